"""What gives other bits each time on a GPU is refused by name; what is named instead computes the same."""

import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.test_two_devices import GPUS, on_gpu
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from midstride.engine.checkpointing.determinism import REPEATABLE, Determinism, refuse_cudnn_dropout
from midstride.engine.errors import NotExact

#: what `make test-gpu` tries on a real one
TABLE = runpy.run_path(str(Path(__file__).parents[2] / "deploy/gpu/operations.py"))


@pytest.fixture(autouse=True)
def repeatable() -> Iterator[None]:
    with Determinism(None, on=True):
        yield


#: layers on a GPU -> what is refused of them
RECURRENT: dict[str, tuple[Callable[[], nn.Module], str | None]] = {
    "LSTM": (lambda: nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2, 2, dropout=0.1)), "module's 1: on a GPU, dropout"),
    "two": (
        lambda: nn.Sequential(nn.GRU(2, 2, 2, dropout=0.1), nn.RNN(2, 2, 3, dropout=0.1)),
        "module's 0, 1: on a GPU",
    ),
    "without dropout": (lambda: nn.LSTM(2, 2, 2), None),
    "one layer": (lambda: nn.Sequential(nn.LSTM(2, 2), nn.Dropout(0.1), nn.LSTM(2, 2)), None),
    "evaluated": (lambda: nn.LSTM(2, 2, 2, dropout=0.1).eval(), None),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_dropout_that_is_drawn_by_cudnn_is_refused(name: str, fake: FakeTensorMode) -> None:
    made, words = RECURRENT[name]
    module = on_gpu(made(), GPUS[0])
    if words is None:
        refuse_cudnn_dropout(module)
        return
    with pytest.raises(NotExact, match=words):
        refuse_cudnn_dropout(module)


#: where torch itself draws
ELSEWHERE: dict[str, Callable[[pytest.MonkeyPatch], object]] = {
    "without cuDNN": lambda monkeypatch: monkeypatch.setattr(torch.backends.cudnn, "enabled", False),
    "not to be the same": lambda monkeypatch: torch.set_deterministic_debug_mode("default"),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_dropout_of_recurrent_layers_is_allowed(
    name: str, fake: FakeTensorMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    ELSEWHERE[name](monkeypatch)
    refuse_cudnn_dropout(on_gpu(nn.LSTM(2, 2, 2, dropout=0.1), GPUS[0]))


def test_on_the_host_it_is_torchs() -> None:
    refuse_cudnn_dropout(nn.LSTM(2, 2, 2, dropout=0.1))


def test_every_operation_that_docs_name_is_tried() -> None:
    assert TABLE["REFUSED"].keys() == REPEATABLE.keys()


@pytest.mark.parametrize("name", REPEATABLE)
def test_what_is_named_instead_gives_the_same_numbers(name: str) -> None:
    operation, instead = TABLE["REFUSED"][name]
    computed: Callable[[Any], tuple[torch.Tensor, torch.Tensor]] = TABLE["numbers"]
    for other in instead:
        for mine, same in zip(computed(other), computed(operation), strict=True):
            torch.testing.assert_close(mine, same, rtol=1e-3, atol=1e-3)
