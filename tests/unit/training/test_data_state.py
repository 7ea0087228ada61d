"""What a DataModule says itself of its state: it comes back as that of a callback does."""

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as L
import torch
from support.nets import Net
from torch import Tensor
from torch.utils.data import DataLoader

from midstride.engine import Callback, DataModule, Trainer
from midstride.engine.errors import UserCodeError


class Scaled(Net):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step([batch[:, None]], batch_idx)
        self.log("loss", loss)
        return loss


class Counting:
    """Counts what it gave where no snapshot looks, and scales by it."""

    def __init__(self) -> None:
        super().__init__()
        self.reader = Reader()

    def train_dataloader(self) -> Any:
        return DataLoader(torch.arange(8.0), 2)  # type: ignore[arg-type]

    def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        return batch * self.reader.advance()

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.reader.tell()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.reader.seek(state_dict["given"])


class Reader:
    """A handle of a library: what it has given is not in its attributes."""

    __slots__ = ("__weakref__",)
    _given: dict[int, int] = {}  # noqa: RUF012

    def __init__(self) -> None:
        self.seek(0)

    def advance(self) -> int:
        self.seek(self.tell() + 1)
        return self.tell()

    def tell(self) -> int:
        return self._given[id(self)]

    def seek(self, given: int) -> None:
        self._given[id(self)] = given


class Ours(Counting, DataModule):
    pass


class Theirs(Counting, L.LightningDataModule):
    pass


class Dies(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 5:
            raise RuntimeError("died")


@pytest.mark.parametrize("kind", [Ours, Theirs])
def test_the_state_that_a_data_module_gives_comes_back(kind: Any, tmp_path: Path) -> None:
    def train(name: str, *callbacks: Callback) -> str:
        trainer = Trainer(max_epochs=2, callbacks=callbacks, snapshots={"every_steps": 1}, enable_progress_bar=False)
        trainer.fit(Scaled(), kind(), run=tmp_path / name)
        return (tmp_path / name / "metrics.csv").read_text()

    with pytest.raises(UserCodeError, match="died"):
        train("died", Dies())
    assert train("died") == train("whole")
