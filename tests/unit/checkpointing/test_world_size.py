"""What several ranks have for themselves, put together for another number of them."""

from typing import Any, cast

import pytest
import torch
import torchmetrics
from torch import nn

from midstride.engine import TrainingModule
from midstride.engine.checkpointing.gradients import Gradients
from midstride.engine.checkpointing.world_size import padding_change
from midstride.engine.data.loader import FitLoaders, ResumableLoader
from midstride.engine.metrics.logger import MetricLogger
from midstride.engine.metrics.torchmetrics_state import TorchmetricsState
from midstride.engine.modules.callback_states import Callbacks
from midstride.engine.modules.module_state import TrainingModes
from midstride.engine.objects.object_state import Objects
from midstride.engine.optim.schedulers import SchedulerList
from midstride.engine.seeds import Generators, seed_everything
from midstride.engine.state.differences import differences


class Module(TrainingModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        self.seen = torchmetrics.SumMetric()


def test_gradients_of_an_open_window_become_their_mean() -> None:
    states = [{"layer.weight": torch.tensor([[float(value)]])} for value in (1, 2, 6)]
    for rank in range(2):
        assert Gradients(Module()).resharded(states, rank)["layer.weight"].item() == 3.0
    exchanged = torch.tensor([[0.1]])
    assert Gradients(Module()).resharded([{"layer.weight": exchanged}] * 3, 1)["layer.weight"].equal(exchanged)
    assert Gradients(Module()).resharded([{}, {}], 0) == {}


#: what the ranks ought to have alike, and the words for where they do not
ALIKE: dict[str, Any] = {
    "a callback": Callbacks([], torch.device("cpu")),
    "a scheduler": SchedulerList([]),
    "is in training": TrainingModes(Module()),
    "a loader": FitLoaders(cast("ResumableLoader", None)),
    "an attribute": Objects.of_module(Module()),
}


@pytest.mark.parametrize("words", ALIKE)
def test_what_one_rank_has_otherwise_is_named(words: str, caplog: pytest.LogCaptureFixture) -> None:
    states = [{"x": {"seen": 1}}, {"x": {"seen": 1}}, {"x": {"seen": 3}}]

    assert ALIKE[words].resharded(states[:2], 1) == states[0]
    assert caplog.text == ""
    assert ALIKE[words].resharded(states, 1) == states[0]

    assert f"{words} " in caplog.text
    assert "(rank 0 and rank 2: x/seen (1, now 3))" in caplog.text


def test_ranks_keep_their_generators_and_new_ones_get_others() -> None:
    states = []
    for rank in range(2):
        seed_everything(rank)
        states.append(Generators().state_dict())
    found = [Generators().resharded(states, rank) for rank in range(4)]
    assert not differences(states, found[:2])
    assert not differences(found[3], Generators().resharded(states, 3))
    for first, second in ((0, 2), (1, 2), (2, 3)):
        assert not torch.equal(found[first]["torch"], found[second]["torch"])


def ranks_of(size: int) -> list[tuple[Module, TorchmetricsState, MetricLogger]]:
    found = []
    for _ in range(size):
        module = Module()
        metrics = TorchmetricsState(module, lambda value: [value], 1)
        found.append((module, metrics, MetricLogger(lambda value: [value], metrics, 1)))
    return found


def test_metrics_and_logged_values_are_counted_once() -> None:
    old, new = ranks_of(3), ranks_of(2)
    for rank, (module, _, logged) in enumerate(old):
        module.seen.update(rank + 1)
        for value in range(rank + 1):  # ranks saw one, two and three batches
            asked = ("mean", False, True, False, True, "mean", True)
            logged.log(asked, float(value), 4)
            logged.begin("validate")
            logged.log(("each", True, False, False, True, "mean", True), float(rank), 1)
            logged.begin("train")
    for rank, (_, metrics, logged) in enumerate(new):
        metrics.load_state_dict(metrics.resharded([part.state_dict() for _, part, _ in old], rank))
        logged.load_state_dict(logged.resharded([part.state_dict() for _, _, part in old], rank))
    assert [module.seen.sum_value.item() for module, _, _ in new] == [6.0, 0.0]
    running = [logged.state_dict()["running"] for _, _, logged in new]
    assert (running[0]["mean"]["total"], running[0]["mean"]["weight"]) == (16.0, 24.0)
    assert running[1] == {}
    steps = [logged.state_dict()["steps"]["each"] for _, _, logged in new]
    assert steps[0] == [(1.0, 3.0), (1.5, 2.0), (2.0, 1.0)]
    assert [weight for _, weight in steps[1]] == [0.0] * 3  # adds nothing, and what comes next stands where it should


@pytest.mark.parametrize("size", [1, 3])
def test_a_step_has_its_last_value_on_fewer_ranks(size: int) -> None:
    asked = ("train/loss", True, False, False, True, "mean", True)
    old = [MetricLogger(lambda value: [value], metrics, 2) for _, metrics, _ in ranks_of(2)]
    for rank, logged in enumerate(old):
        logged.log(asked, float(rank), 4)  # in a window that is open when the run dies
    for rank, (_, metrics, _) in enumerate(ranks_of(size)):
        logged = MetricLogger(lambda value: [value], metrics, size)
        logged.load_state_dict(logged.resharded([part.state_dict() for part in old], rank))
        logged.log(asked, 7.0, 4)
        logged.rows.step(0, 1)
        logged.rows.close()
        assert logged.drain_rows().splitlines()[-1] == "0,1,7.0"


def test_an_end_that_is_padded_anew_is_put_in_words() -> None:
    assert padding_change(70, 2, 1) is None
    words = padding_change(70, 3, 7)
    assert words is not None
    assert "70 samples are no multiple of the ranks: 3 ranks padded the last batch of an epoch with 2" in words
