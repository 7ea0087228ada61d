"""What hooks between the batches of two epochs see and log."""

from typing import Any

from laws.objects.small import Rows, Small
from torch import Tensor
from torch.utils.data import DataLoader


class _Short(Small):
    """Two steps to an epoch, and a validation at its end."""

    def train_dataloader(self) -> Any:
        return DataLoader(Rows(), 12, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(Rows(), 7)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.layer(batch).square().mean())


class LogsAtEnd(_Short):
    """Logs in hooks that belong to no batch, under names of their own and under those of steps."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("mean", loss, on_step=False, on_epoch=True)
        return loss

    def on_validation_epoch_end(self) -> None:
        self.log("val", 0.1)
        self.log("val of the end", 0.1)

    def on_train_epoch_end(self) -> None:
        self.log("mean", 0.1)
        self.log("end", 0.1)


class LogsWithoutValidation(LogsAtEnd):
    def val_dataloader(self) -> Any:
        return None


class AsksForLast(_Short):
    """Trains by whether the batch is the last one, as hooks see it that come after it."""

    def build(self) -> None:
        self.seen: list[bool] = []

    def factor(self, batch: Tensor) -> Any:
        self.seen.append(self.trainer.is_last_batch)
        return 1 + sum(self.seen)

    def _see(self) -> None:
        self.seen.append(self.trainer.is_last_batch)

    on_validation_end = on_train_epoch_end = _see

    def on_train_epoch_start(self) -> None:
        assert not self.trainer.is_last_batch, "no batch of this epoch is in hand"
