"""Asked to stop, or for a snapshot, at any moment: all ranks do it together, and not a bit is other for it."""

import json
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from laws.axes import cover
from laws.lives import LAYOUTS, Setting, Tangled, assert_alike, live
from torch import Tensor, nn
from torch.distributed import FileStore
from torch.utils.data import DataLoader

from midstride.engine import Trainer, TrainingModule
from midstride.engine.errors import StopRequested
from midstride.engine.fault_injection import FaultPlan
from midstride.engine.processes.signal_handlers import signal_handlers
from midstride.engine.session import requests as requests_module
from midstride.engine.session.requests import BoundaryAgreement, Request, RequestKind, SignalRequests
from midstride.engine.testing import run_ranks
from midstride.engine.world import World

STOPPED = 75

AXES: dict[str, list[Any]] = {
    "phase": ["fetch", "backward", "validation", "snapshot_write", "before_commit", "epoch_end"],
    "step": [0, 2, 5],
    "ranks": [1, 2, 3],
    "layout": list(LAYOUTS),
    "asked": ["first", "last", "all", "twice"],
}


def plan_of(folder: Path, case: dict[str, Any], kind: Any = "stop") -> FaultPlan:
    folder.mkdir()
    plan = FaultPlan(folder)
    ranks = {"first": [0], "last": [case["ranks"] - 1], "all": range(case["ranks"]), "twice": [0, 0]}[case["asked"]]
    step = 1 if case["layout"] == "accumulation" and case["step"] == 5 else case["step"]
    for rank in ranks:
        plan.add(kind, rank=rank, step=step, phase=case["phase"])
    return plan


def resumed_from(folder: Path, generation: int) -> str:
    return json.loads((folder / "run" / "lease" / f"{generation:06d}.json").read_text())["resumed_from"] or ""


@pytest.mark.parametrize(
    "case", cover(AXES, seed=2), ids=lambda case: "-".join(map(str, case.values())).replace(" ", "_")
)
def test_a_stopped_world_stops_together_and_resumes_there(
    case: dict[str, Any], tmp_path: Path, undisturbed: Callable[[Setting], Path]
) -> None:
    # A writer may be so far behind that a fit with few snapshots is done when it is asked.
    behind = case["phase"] in ("snapshot_write", "before_commit") and case["layout"] == "epoch ends"
    setting = Setting(ranks=case["ranks"], layout="every step" if behind else case["layout"])
    plan = plan_of(tmp_path / "plan", case)
    assert live(setting, tmp_path, plan) == [STOPPED] * setting.ranks
    plan.assert_all_fired()
    assert live(setting, tmp_path, plan) == [0] * setting.ranks
    position = resumed_from(tmp_path, 2).rpartition("-g")[0]
    assert position, "a snapshot was taken for the stop"
    assert_alike(tmp_path, undisturbed(setting))


@pytest.mark.parametrize("strategy", ["sharded", "fully_sharded", "horovod"])
def test_a_stop_in_a_window_keeps_its_accumulated_gradients(
    strategy: str, tmp_path: Path, undisturbed: Callable[[Setting], Path]
) -> None:
    setting = Setting(ranks=2, layout="accumulation", options={"strategy": strategy})
    plan = FaultPlan(tmp_path / "plan").add("stop", rank=1, step=2, phase="backward", visit=1)
    assert live(setting, tmp_path, plan) == [STOPPED] * 2
    plan.assert_all_fired()
    assert live(setting, tmp_path, plan) == [0, 0]
    step, _, after = resumed_from(tmp_path, 2).rpartition("-g")[0].partition(".")
    assert (int(step), int(after) > 0) == (2, True), "it stands inside a window"
    assert_alike(tmp_path, undisturbed(setting))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stop_after_the_last_step_is_a_finished_fit(
    ranks: int, tmp_path: Path, undisturbed: Callable[[Setting], Path]
) -> None:
    setting = Setting(ranks=ranks, layout="epoch ends")
    # The second snapshot of that step is the fit's end: no boundary comes after it.
    plan = FaultPlan(tmp_path / "plan").add("stop", rank=ranks - 1, step=12, phase="before_commit", visit=1)
    assert live(setting, tmp_path, plan) == [0] * ranks
    plan.assert_all_fired()
    assert_alike(tmp_path, undisturbed(setting))


@pytest.mark.parametrize(("ranks", "phase"), [(1, "validation"), (1, "forward"), (2, "backward"), (2, "validation")])
def test_a_requested_snapshot_is_taken_and_training_continues(
    ranks: int, phase: str, tmp_path: Path, undisturbed: Callable[[Setting], Path]
) -> None:
    setting = Setting(ranks=ranks, layout="epoch ends")
    plan = FaultPlan(tmp_path / "plan").add("snapshot", rank=ranks - 1, step=1, phase=phase)
    plan.add("kill", step=5, phase="forward")  # before the first snapshot that is due
    assert -9 in live(setting, tmp_path, plan)
    assert live(setting, tmp_path, plan) == [0] * ranks
    plan.assert_all_fired()
    assert 1 <= int(resumed_from(tmp_path, 2)[:12]) <= 4
    assert_alike(tmp_path, undisturbed(setting))


@pytest.mark.parametrize(("step", "newest"), [(2, 0), (7, 6)])
def test_a_stop_without_time_for_a_snapshot_is_as_exact(
    step: int, newest: int, tmp_path: Path, undisturbed: Callable[[Setting], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = Setting(ranks=2, layout="epoch ends")
    plan = FaultPlan(tmp_path / "plan").add("stop", rank=1, step=step, phase="forward")
    with monkeypatch.context() as patch:
        patch.setenv("MIDSTRIDE_GRACE_S", "0")
        assert live(setting, tmp_path, plan) == [STOPPED, STOPPED]
    plan.assert_all_fired()
    assert live(setting, tmp_path, plan) == [0, 0]
    assert int(resumed_from(tmp_path, 2)[:12] or 0) == newest
    assert_alike(tmp_path, undisturbed(setting))


def test_a_second_request_grants_no_more_time() -> None:
    requests, deadlines = SignalRequests(), set()
    with requests.listening(None, World()):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            request = requests.at_boundary()
            assert request is not None
            deadlines.add(request.deadline)
    assert len(deadlines) == 1


@pytest.mark.parametrize("set_by", [0.0, 3600.0, -3600.0])
def test_the_grace_ignores_changes_of_the_clock(set_by: float, monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"calendar": 1e9, "since boot": 100.0}
    clock = SimpleNamespace(time=lambda: now["calendar"], monotonic=lambda: now["since boot"])
    monkeypatch.setattr(requests_module, "time", clock)
    requests = SignalRequests()
    requests.grace_s = 20.0
    with requests.listening(None, World()):
        os.kill(os.getpid(), signal.SIGTERM)
        now["calendar"] += 5.0 + set_by
        now["since boot"] += 5.0
        asked = requests.at_boundary()
    assert asked == Request(RequestKind.STOP, 118.0)
    assert asked.left_s == 13.0


def agree(store: str, ahead_s: float) -> None:
    """Agree on a request to stop that rank 0 has; the clocks of each rank are those of a machine of its own."""
    world = World.from_environment()
    own_s = ahead_s * world.rank
    clock = SimpleNamespace(time=lambda: 1e9 + own_s, monotonic=lambda: 1e4 + own_s)
    asked = Request(RequestKind.STOP, clock.monotonic() + 18.0) if world.rank == 0 else None
    with mock.patch.object(requests_module, "time", clock):
        ranks = BoundaryAgreement(lambda: asked is not None, lambda: asked, FileStore(store, 2), world, None)
        while (agreed := ranks.at_boundary()) is None:
            pass
        assert agreed.left_s == 18.0
        ranks.close()


@pytest.mark.parametrize("ahead_s", [0.0, 3600.0, -3600.0])
def test_ranks_whose_clocks_differ_have_the_same_grace(ahead_s: float, tmp_path: Path) -> None:
    assert run_ranks(agree, str(tmp_path / "store"), ahead_s, processes=2) == [0, 0]


class Squares(TrainingModule):
    """Trains one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.weight * batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class AsksToStop(logging.Filter):
    """Sends SIGTERM to this process as a fit says on what it trains."""

    def filter(self, record: logging.LogRecord) -> bool:
        if "samples a step" in record.getMessage():
            os.kill(os.getpid(), signal.SIGTERM)
        return True


def test_a_stop_at_the_first_message_stops_after_one_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    unheard: list[int] = []
    caplog.set_level(logging.INFO)
    with (
        caplog.filtering(AsksToStop()),
        signal_handlers({signal.SIGTERM: lambda number, frame: unheard.append(number)}),
        pytest.raises(StopRequested, match="asked to stop, after step 1"),
    ):
        Trainer(max_epochs=1).fit(Squares(), DataLoader([1.0, 2.0]), run=str(tmp_path / "run"))
    assert not unheard
    assert [snapshot.name[:12] for snapshot in (tmp_path / "run" / "snapshots").iterdir()] == [f"{1:012}"]


@pytest.mark.parametrize("phase", ["backward", "validation"])
def test_a_stop_without_snapshots_stops_every_rank(phase: str, tmp_path: Path) -> None:
    """Nobody is gone while another still asks at which batch they all stop."""
    plan = FaultPlan(tmp_path / "plan").add("stop", rank=2, step=2, phase=phase)
    assert live(Setting(ranks=3, options={"snapshots": None}), tmp_path, plan) == [STOPPED] * 3
    plan.assert_all_fired()


class Talking(Tangled):
    """Talks to the other ranks in a hook of its own."""

    def on_validation_epoch_end(self) -> None:
        dist.all_reduce(torch.ones(1))


def test_a_rank_that_dies_during_a_hook_is_no_user_error(
    tmp_path: Path, undisturbed: Callable[[Setting], Path]
) -> None:
    setting = Setting(ranks=2, layout="every step", module=Talking)
    plan = FaultPlan(tmp_path / "plan").add("kill", rank=1, step=3, phase="validation")
    assert live(setting, tmp_path, plan) == [1, -9]  # 2 would be the user's
    assert live(setting, tmp_path, plan) == [0, 0]
    plan.assert_all_fired()
    assert_alike(tmp_path, undisturbed(setting))
