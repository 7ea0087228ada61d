"""Ranks that are forked must be able to use their GPU: those of torch's agent, and those of a Trainer."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import nets
from torch import Tensor

from midstride.engine import Trainer
from midstride.engine.errors import JobError
from midstride.engine.launch import elastic_ranks
from midstride.engine.ranks import dispatch, gpus

MODULE = "json.tool"
RANK = (sys.executable, "-u", "-m", MODULE)
#: command of a rank, whether a fork could use CUDA -> whether it is forked
CASES = {
    "a rank": (RANK, True, True),
    "CUDA has been asked": (RANK, False, False),
    "bound to a NUMA node": (("numactl", *RANK), True, False),
    "another module": ((*RANK[:3], "json"), True, False),
}


class Fork:
    """What is made for a rank that is forked."""

    def __init__(self, main: Callable[[], None], environment: dict[str, str]) -> None:
        self.environment = environment


@pytest.mark.parametrize("case", CASES)
def test_a_rank_that_could_not_use_its_gpu_is_started_afresh(case: str) -> None:
    command, can_use_cuda, is_forked = CASES[case]

    def given(start: Callable[..., Any]) -> Any:
        return start

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        patch.setattr(elastic_ranks, "preload", lambda *modules: None)
        patch.setattr(elastic_ranks, "ranks_started_by", given)
        patch.setattr(elastic_ranks, "ForkedProgram", Fork)
        patch.setattr(elastic_ranks, "fork_cannot_use_cuda", lambda: not can_use_cuda)
        start: Any = elastic_ranks.ranks_forked(MODULE)
        started = start(command, {"RANK": "0"})
    assert (started is not None) == is_forked
    assert started is None or started.environment == {"RANK": "0"}


class Net(nets.Net):
    inputs = 2

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step([batch], batch_idx)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.zeros(4, 2))


def test_a_check_leaves_gpus_to_ranks_forked_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "is_in_bad_fork", lambda: False)  # whatever ran in this process before
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: pytest.fail(f"{device} is used"))
    module = Net()
    assert Trainer(strategy="ddp_fork", devices=2, max_epochs=1).check(module) == []
    assert module.layer.weight.is_cpu


def test_a_fit_on_the_cpu_leaves_gpus_to_ranks_forked_later(tmp_path: Path) -> None:
    """Merely to ask `torch.cuda.is_available` takes CUDA from every process that is forked later."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        patch.setattr(torch.cuda, "device_count", lambda: 2)
        for name in ("is_available", "init", "set_device", "cudart"):
            patch.setattr(torch.cuda, name, lambda *_, name=name: pytest.fail(f"{name} is called"))
        Trainer(accelerator="cpu", max_epochs=1, snapshots={"every_steps": 2}).fit(Net(), run=tmp_path / "run")


#: how ranks are started, their GPUs, whether a fork could use CUDA -> whether the call is refused
CALLS = {
    "forked": ("fork", [0, 1], True, False),
    "forked after CUDA was used": ("fork", [0, 1], False, True),
    "forked, on the CPU": ("fork", [], False, False),
    "spawned": ("spawn", [0, 1], False, False),
}


@pytest.mark.parametrize("case", CALLS)
def test_ranks_are_not_forked_once_cuda_was_used(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start, gpus, can_use_cuda, is_refused = CALLS[case]
    started: list[str] = []

    class Ended(Exception):
        """The ranks would begin here."""

    def run(call: Any, ranks: int, method: str) -> Any:
        started.append(method)
        raise Ended

    monkeypatch.setattr(dispatch, "run_in_children", run)
    monkeypatch.setattr(dispatch, "fork_cannot_use_cuda", lambda: not can_use_cuda)
    trainer: Any = SimpleNamespace(placement=SimpleNamespace(start=start, gpus=gpus, ranks=2), arguments={})
    trainer.detach = lambda module, verb, arguments: arguments

    @dispatch.on_all_ranks
    def fit(self: Any, module: Any, data: Any = None) -> None: ...

    with pytest.raises(JobError if is_refused else Ended, match="after CUDA was used" if is_refused else None):
        fit(trainer, Net())
    assert started == ([] if is_refused else [start])
