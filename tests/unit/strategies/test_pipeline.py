"""What a pipeline cannot do, refused by name, all of it at once and before a process starts; and how layers are cut."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.nets import Net
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from midstride.engine import Trainer, TrainingModule
from midstride.engine.config.job import TrainingJob
from midstride.engine.errors import JobError, UserError
from midstride.engine.strategies.pipeline.balance import balance_stages, bounds


def linears(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(count)))


class Module(TrainingModule):
    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.sequential_module = layers

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.sequential_module(batch[0])

    def training_step_end(self, outputs: Tensor, batch: Any) -> Tensor:  # type: ignore[override]
        return outputs.mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Several(Module):
    def configure_optimizers(self) -> Any:
        return [super().configure_optimizers(), super().configure_optimizers()]

    def training_step(self, batch: Any, batch_idx: int, optimizer_idx: int = 0) -> Any:
        return super().training_step(batch, batch_idx)


class ByHand(Module):
    automatic_optimization = False


class Headed(Module):
    def __init__(self) -> None:
        super().__init__(linears(2))
        self.head = nn.Linear(2, 1)


class Whole(Net):
    inputs = 2


def tied() -> nn.Sequential:
    layers = linears(4)
    layers[2].weight = layers[1].weight
    return layers


class Counter(nn.Module):
    def forward(self, x: Any) -> Any:
        return x


def normed() -> nn.Sequential:
    norm = nn.BatchNorm1d(2, affine=False)
    return nn.Sequential(nn.Linear(2, 2), norm, nn.Linear(2, 2), norm, nn.Linear(2, 2))


def counted() -> nn.Sequential:
    counter = Counter()
    return nn.Sequential(nn.Linear(2, 2), counter, nn.Linear(2, 2), nn.Sequential(counter), nn.Linear(2, 2))


class Built(Module):
    """Has its layers from `setup` on."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__(nn.Identity())
        del self.sequential_module
        self._layers = [layers]

    def setup(self, stage: str) -> None:
        self.sequential_module = self._layers[0]


REFUSED: dict[str, tuple[TrainingModule, dict[str, Any], dict[str, Any], list[str]]] = {
    "no layers in a row, and no place for the loss": (
        Whole(),
        {},
        {},
        ["no training_step_end(outputs, batch)", "self.sequential_module, an nn.Sequential; Whole has none"],
    ),
    "something else in its place": (Module(nn.ModuleList()), {}, {}, ["Module has a ModuleList"]),
    "layers that are not counted right": (Module(linears(3)), {"balance": [2, 2]}, {}, ["cuts 4 layers", "has 3"]),
    "a stage without anything to train": (
        Module(nn.Sequential(nn.Linear(2, 2), nn.ReLU())),
        {"balance": [1, 1]},
        {},
        ["stage 1 nothing to train", "layers 1 to 1 (ReLU)"],
    ),
    "a buffer in two stages": (Module(normed()), {"balance": [2, 3]}, {}, ["between layers 1 and 3", "a buffer"]),
    "a layer of one's own in two stages": (Module(counted()), {"balance": [2, 3]}, {}, ["layers 1 and 3", "of yours"]),
    "one parameter in two stages": (Module(tied()), {"balance": [2, 2]}, {}, ["between layers 1 and 2", "share"]),
    "more stages than layers": (Module(linears(1)), {}, {}, ["2 stages", "has 1 layers only"]),
    "too few layers, built in setup": (Built(linears(1)), {}, {}, ["2 stages", "has 1 layers only"]),
    "parameters beside the layers": (Headed(), {}, {}, ["outside sequential_module", "head.weight, head.bias"]),
    "a step by hand": (ByHand(linears(2)), {}, {}, ["automatic_optimization = False"]),
    "several optimizers": (Several(linears(2)), {}, {}, ["pipeline with 2 optimizers"]),
    "batches left out, and too many parts": (
        Module(linears(2)),
        {"micro_batches": 8},
        {"on_nan": "skip"},
        ["micro_batches=8, and a batch has 4 samples", "on_nan: skip with strategy pipeline"],
    ),
    "stages that no processes are left for": (Module(linears(3)), {"stages": 3}, {}, ["3 stages in a world of 2"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_is_refused_by_name(case: str) -> None:
    module, arguments, options, words = REFUSED[case]
    trainer = Trainer(strategy="pipeline", strategy_args=arguments, max_epochs=1, **options)
    data = DataLoader(TensorDataset(torch.zeros(8, 2)), 4)
    found = "\n".join(trainer.check(module, data, processes=2))
    for word in words:
        assert word in found


@pytest.mark.parametrize("kind", [Module, Built])
def test_what_can_be_cut_is_not_refused(kind: type[Module]) -> None:
    trainer = Trainer(strategy="pipeline", max_epochs=1)
    assert not trainer.check(kind(linears(2)), DataLoader(TensorDataset(torch.zeros(8, 2)), 4), processes=2)


CHOICES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "no numbers": ({"balance": [1, 0]}, ["balance", "[1, 0]"]),
    "no such rule": ({"balance": "speed"}, ["balance", "a list, size, time", "'speed'"]),
    "two numbers of stages": ({"balance": [1, 1], "stages": 3}, ["stages=3", "balance=[1, 1]"]),
    "nothing to cut": ({"processes": 1}, ["pipeline on 1 processes", "at least 2 stages"]),
    "processes left over": ({"processes": 3, "stages": 2}, ["pipeline on 3 processes", "multiple"]),
    "no parts": ({"micro_batches": 0}, ["micro_batches", "from 1 on"]),
    "a scale of the loss": ({"precision": "16"}, ["precision 16 with pipeline", "bf16"]),
    "an unknown schedule": ({"schedule": "zigzag"}, ["schedule", "1f1b, gpipe"]),
}


@pytest.mark.parametrize("case", CHOICES)
def test_a_job_is_refused_where_it_is_read(case: str) -> None:
    given, words = CHOICES[case]
    arguments = {name: value for name, value in given.items() if name not in ("processes", "precision")}
    world = {"strategy": "pipeline", "processes": given.get("processes", 2), "strategy_args": arguments}
    trainer = {"max_epochs": 1, "precision": given.get("precision", "32")}
    with pytest.raises(ValueError) as caught:
        TrainingJob.model_validate({"name": "a", "module": "a:A", "data": "a:B", "world": world, "trainer": trainer})
    for word in words:
        assert word in str(caught.value)


def test_a_trainer_refuses_them_all_at_once() -> None:
    with pytest.raises(JobError) as caught:
        Trainer(strategy="pipeline", strategy_args={"balance": [0], "micro_batches": 0, "schedule": ""}, precision=16)
    assert "4 faults" in str(caught.value)


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=2, max_size=7), st.integers(1, 4))
def test_no_other_cut_costs_less(layers: list[tuple[int, bool]], stages: int) -> None:
    costs = [float(cost) for cost, _ in layers]
    modules = [nn.Linear(1, 1) if trains else nn.ReLU() for _, trains in layers]

    def cost(balance: list[int]) -> float:
        return max(sum(costs[start:end]) for start, end in bounds(balance))

    def is_possible(balance: list[int]) -> bool:
        return all(any(trains for _, trains in layers[start:end]) for start, end in bounds(balance))

    ends = itertools.combinations(range(1, len(layers)), stages - 1)
    cuts = [[b - a for a, b in itertools.pairwise([0, *end, len(layers)])] for end in ends]
    possible = [cut for cut in cuts if is_possible(cut)]
    if not possible:
        with pytest.raises(UserError, match="no way to cut them"):
            balance_stages(costs, modules, stages)
    else:
        found = balance_stages(costs, modules, stages)
        assert found in possible
        assert cost(found) == min(map(cost, possible))


def test_layers_that_share_a_parameter_stay_together() -> None:
    layers = list(tied())
    assert balance_stages([1.0, 1.0, 1.0, 1.0], layers, 2) in ([1, 3], [3, 1])
    with pytest.raises(UserError, match="layers that share parameters must be in one stage"):
        balance_stages([1.0] * 4, layers, 4)
