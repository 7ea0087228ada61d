"""The strategy xla by its parts, where there is a torch_xla or its stand-in."""

from pathlib import Path
from typing import Any

import pytest
import torch
from laws.lives import SampleData, Tangled
from laws.xla_world import STAND_IN, run_xla_ranks
from torch import Tensor, nn

from midstride.engine import Trainer, TrainingModule
from midstride.engine.errors import JobError, StrategyUnavailable, UserError, WorldError
from midstride.engine.strategies.build_strategy import build_strategy
from midstride.engine.world import World

only_stand_in = pytest.mark.skipif(STAND_IN is None, reason="torch_xla's own CPU device is one process's")


def here(**options: Any) -> Any:
    strategy = build_strategy("xla", options)
    strategy.attach(World.from_environment(), [torch.device("cpu")])
    strategy.init_process_group()
    return strategy


def exchange() -> None:
    strategy = here()
    rank, size = strategy.world.rank, strategy.world.size
    assert strategy.collective.gather(rank) == list(range(size))
    everywhere, on_one, nowhere, frozen = (nn.Parameter(torch.zeros(2, 2, device=strategy.device)) for _ in range(4))
    frozen.requires_grad_(False)
    everywhere.grad = torch.full_like(everywhere, float(rank))
    on_one.grad = torch.full_like(on_one, 3.0) if rank == 1 else None
    strategy.reduce_gradients([everywhere, on_one, nowhere, frozen])
    assert torch.equal(everywhere.grad, torch.ones(2, 2))
    assert torch.equal(on_one.grad, torch.ones(2, 2))
    assert nowhere.grad is None
    assert frozen.grad is None

    module = nn.BatchNorm1d(2)
    with torch.no_grad():
        module.running_mean += rank
        module.weight += rank
    strategy.setup_module(module, scope=None)
    assert torch.equal(module.running_mean, torch.zeros(2))
    assert torch.equal(module.weight, torch.ones(2))


@only_stand_in
def test_what_ranks_exchange() -> None:
    assert run_xla_ranks(exchange, processes=3) == [0, 0, 0]


def predict() -> None:
    class Predicts(Tangled):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return {"predicted": self(batch[0]), "index": batch[2]}

    trainer = Trainer(strategy="xla", enable_progress_bar=False)
    found = trainer.predict(Predicts(), SampleData(1, 0).val_dataloader())
    assert [len(one["index"]) for one in found] == [2, 2, 2, 1]
    assert {tensor.device.type for one in found for tensor in one.values()} == {"cpu"}


def test_predictions_are_on_the_host() -> None:
    assert run_xla_ranks(predict) == [0]


def calls_of(folder: str, snapshots: Any) -> None:
    import torch_xla

    trainer = Trainer(
        strategy="xla", max_epochs=2, accumulate_grad_batches=4, snapshots=snapshots, val_check_interval=3
    )
    trainer.fit(Tangled(), SampleData(1, 0), run=f"{folder}/run")
    Path(folder, "calls").write_text(f"{torch_xla.calls}")


@only_stand_in
def test_graphs_end_at_the_same_places_without_snapshots(tmp_path: Path) -> None:
    said = []
    for snapshots in (None, {"every_steps": 1}):
        folder = tmp_path / str(len(said))
        folder.mkdir()
        assert run_xla_ranks(calls_of, str(folder), snapshots) == [0]
        said.append((folder / "calls").read_text())
    assert said[0] == said[1]
    # Each epoch has 6 batches, and two validations of 4.
    assert said[0].count("sync") == 2 * (6 + 2 * 4)


class Tied(TrainingModule):
    """A weight in two places, and an optimizer that may be made too early."""

    def __init__(self, early: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.early = torch.optim.SGD(self.parameters(), lr=0.1) if early else None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert batch[0].device == self.device == self.first.weight.device
        return self.second(self.first(batch[0])).square().mean()

    def configure_optimizers(self) -> Any:
        return self.early or torch.optim.SGD(self.parameters(), lr=0.1)


def tie() -> None:
    module = Tied(early=False)
    for _ in range(2):
        trainer = Trainer(strategy="xla", max_steps=2, snapshots=None, enable_progress_bar=False)
        trainer.fit(module, SampleData(1, 0))
        assert module.first.weight is module.second.weight
        assert len(trainer.optimizers[0].param_groups[0]["params"]) == 3


def test_a_weight_in_two_places_stays_one() -> None:
    assert run_xla_ranks(tie) == [0]


def refuse() -> None:
    strategy = here()
    strategy.devices = [torch.device("meta")]  # a device of another kind, as a TPU is
    with pytest.raises(UserError, match="the SGD holds weights as they were before strategy xla brought them"):
        strategy.setup_optimizers([Tied(early=True).early], [])
    with pytest.raises(StrategyUnavailable, match="there is no core 5: torch_xla finds 1 here"):
        here(core=5)
    module = Tied(early=False)
    module.table = nn.Embedding(2, 2, sparse=True)
    with pytest.raises(JobError, match="the module's table has sparse gradients, which XLA devices do not have"):
        Trainer(strategy="xla", max_steps=1).fit(module, SampleData(1, 0))


def test_what_cannot_be_is_refused() -> None:
    assert run_xla_ranks(refuse) == [0]


def too_many() -> None:
    from torch_xla._internal import pjrt

    pjrt.initialize_multiprocess = lambda rank, size: None  # as on a device that belongs to one process
    with pytest.raises(WorldError, match="a world of 2, and torch_xla knows of 1: start one process for each core"):
        here()


def test_more_ranks_than_cores_are_refused() -> None:
    assert run_xla_ranks(too_many, processes=2) == [0, 0]
