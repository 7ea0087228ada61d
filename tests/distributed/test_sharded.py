"""Sharded training as a user meets it: weights that come out whole, pieces that fit any world, what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from laws.lives import SampleData, Tangled
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from midstride.engine import Callback, Trainer, TrainingModule
from midstride.engine.errors import EngineError
from midstride.engine.snapshots.codec import differences
from midstride.engine.snapshots.history import History
from midstride.engine.snapshots.pieces import Piece, join, mapped
from midstride.engine.snapshots.reader import read
from midstride.engine.snapshots.store import Store
from midstride.engine.testing import run_ranks

BOTH = ["sharded", "fully_sharded"]


def trainer_of(strategy: str, **options: Any) -> Trainer:
    given = {"max_epochs": 1, "snapshots": {"every_steps": 2, "keep": 100}, "enable_progress_bar": False, **options}
    return Trainer(strategy=strategy, seed=5, **given)


class Deep(Tangled):
    """With blocks in a list, two of which share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        self.blocks[1].weight = self.blocks[0].weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.middle(torch.relu(self.norm(self.first(x).view(-1, 20, 2)).flatten(1)))
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        return self.last(hidden)


def whole(run: Path, part: str, name: str | None = None) -> Any:
    """Return a part of a snapshot with its pieces put together, and the rest as rank 0 has it."""
    store = Store.open(run)
    found = [one for one in History(store).snapshots() if name in (None, one.name)][-1]
    trees = [read(store, found, rank)[part] for rank in range(found.manifest["world_size"])]
    pieces = [[] for _ in trees]
    for tree, own in zip(trees, pieces, strict=True):
        mapped(tree, lambda value, own=own: own.append(value) if isinstance(value, Piece) else None)
    joined = iter([join(ranks) for ranks in zip(*pieces, strict=True)])
    return _plain(mapped(trees[0], lambda value: next(joined) if isinstance(value, Piece) else value))


def _plain(tree: Any) -> Any:
    return {key: _plain(value) for key, value in tree.items()} if isinstance(tree, dict) else tree


class Witness(Callback):
    """Gathers what a life begins with."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.seen = False

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if self.seen:
            return
        self.seen = True
        optimizer = {"0": trainer.optimizers[0].state_dict()}
        state = mapped({"module": dict(module.state_dict()), "optimizers": optimizer}, gathered)
        if trainer.world.is_first:
            torch.save(_plain(state), f"{self.folder}/begins-{trainer.progress.step}-of-{trainer.world.size}.pt")


def gathered(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


class Adaptive(Deep):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, amsgrad=True)


def go_on(folder: str, strategy: str, steps: int) -> None:
    trainer = trainer_of(strategy, max_steps=steps, callbacks=[Witness(folder)])
    trainer.fit(Adaptive(), SampleData(3, 0), run=f"{folder}/run")


@pytest.mark.parametrize("strategy", BOTH)
def test_pieces_are_cut_anew_for_another_world_bit_for_bit(strategy: str, tmp_path: Path) -> None:
    before: str | None = None
    for steps, size in enumerate((3, 2, 4)):
        assert run_ranks(go_on, str(tmp_path), strategy, steps + 1, processes=size) == [0] * size
        begins = torch.load(tmp_path / f"begins-{steps}-of-{size}.pt")
        if before is not None:
            kept = {part: whole(tmp_path / "run", part, before) for part in ("module", "optimizers")}
            assert differences(kept, begins) == []
        before = History(Store.open(tmp_path / "run")).snapshots()[-1].name


class Refused(TrainingModule):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.turned = nn.Parameter(torch.randn(3, 2).t())
        self.words = nn.Embedding(4, 2, sparse=True)
        self.wide = nn.Parameter(torch.randn(2, dtype=torch.float64))
        self.automatic_optimization = False


class Early(Tangled):
    """Makes its optimizer too early."""

    def __init__(self) -> None:
        super().__init__()
        self.made = torch.optim.SGD(self.parameters(), lr=0.1)

    def configure_optimizers(self) -> Any:
        return self.made


class Two(Tangled):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.first, self.last)]


REFUSED: dict[str, tuple[type[TrainingModule], list[str]]] = {
    "weights": (Refused, ["scale", "(1,)", "turned", "contiguous", "words", "sparse", "float32, float64", "by hand"]),
    "an optimizer made too early": (Early, ["SGD", "before strategy sharded cut", "configure_optimizers"]),
    "two optimizers": (Two, ["2 optimizers", "parameter groups", "ddp"]),
}


def refused(folder: str, module: type[TrainingModule]) -> None:
    try:
        trainer_of("sharded").fit(module(), SampleData(1, 0), run=f"{folder}/run")
    except EngineError as error:
        Path(folder, "error").write_text(str(error))
        raise


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_cut_is_named(case: str, tmp_path: Path) -> None:
    module, words = REFUSED[case]
    assert run_ranks(refused, str(tmp_path), module, processes=1) == [2]
    text = (tmp_path / "error").read_text()
    for word in words:
        assert word in text
    assert not list(tmp_path.glob("run/snapshots/*"))
