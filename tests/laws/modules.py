"""Modules that are easily resumed wrongly, one row each: a new kind of training is one more row."""

from typing import Any

import torch
import torchmetrics
from laws.lives import Tangled, note_samples
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from midstride.engine import TrainingModule

__all__ = ["MODULES"]


class Metered(Tangled):
    """torchmetrics with sum, mean and cat states, one of them logged in training."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torchmetrics.MeanMetric()
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)
        self.area = torchmetrics.AUROC(task="multiclass", num_classes=3)
        self.both = torchmetrics.MetricCollection({"micro": torchmetrics.Accuracy(task="multiclass", num_classes=3)})

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.seen.update(loss.detach())
        self.log("train/seen", self.seen)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        x, y, _ = batch
        for metric in (self.accuracy, self.area, self.both):
            metric.update(self(x), y)
        self.log("val/accuracy", self.accuracy)
        self.log("val/area", self.area)
        self.log("val/both", self.both)
        self.log("val/each", float(y.sum()), on_step=True, sync_dist=True)


class Plateau(Tangled):
    """A scheduler that watches a logged value, one that counts epochs, and a state of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.counted = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.counted += 1
        return super().training_step(batch, batch_idx) * (1 + self.counted % 3)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        epochs = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1], gamma=0.5)
        return [optimizer], [{"scheduler": plateau, "monitor": "val/loss"}, epochs]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["counted"] = self.counted

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.counted = checkpoint["counted"]


class Rivals(TrainingModule):
    """Two networks with an optimizer each, as in a GAN, stepped by the engine."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 6))
        self.judge = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))

    def losses(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made = self.maker(torch.randn_like(x))
        return -self.judge(made).mean(), self.judge(made.detach()).mean() - self.judge(x).mean()

    def training_step(self, batch: Any, batch_idx: int, optimizer_idx: int) -> Tensor:  # type: ignore[override]
        note_samples(self, batch[2])
        loss = self.losses(batch[0])[optimizer_idx]
        self.log(f"train/{optimizer_idx}", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.losses(batch[0])[1], sync_dist=True)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(net.parameters(), lr=1e-2) for net in (self.maker, self.judge)]


class Manual(Rivals):
    """The same, stepped by hand; gradients of one network stay over the end of a step."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        note_samples(self, batch[2])
        for optimizer, number in zip(self.optimizers(), (0, 1), strict=True):
            optimizer.zero_grad()
            self.manual_backward(self.losses(batch[0])[number])
            if number or batch_idx % 2:
                optimizer.step()


class Drawing(Tangled):
    """Draws from every generator in the training step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        import random

        import numpy as np

        noise = random.gauss(0, 1) + float(np.random.normal()) + float(torch.randn(()))
        return super().training_step(batch, batch_idx) * (1 + 0.1 * noise)


class Skipping(Tangled):
    """Leaves some batches out."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 3 == 1 else {"loss": loss}


class Moody(Tangled):
    """Changes itself in hooks, and gathers outputs in a list, as many do."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []
        self.steps = 0

    def on_train_start(self) -> None:
        torch.rand(3)

    def on_train_epoch_start(self) -> None:
        self.norm.eval()
        self.middle.bias.requires_grad_(self.current_epoch == 1 or self.trainer.world.size > 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        return super().training_step(batch, batch_idx) * (1 + self.steps % 3)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.outputs.append(self(batch[0]))

    def on_validation_epoch_end(self) -> None:
        self.log("val/spread", torch.cat(self.outputs).std() if self.outputs else 0.0)
        self.outputs = []


class Handed(Tangled):
    """The loss is made in training_step_end."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, index = batch
        note_samples(self, index)
        return {"logits": self(x), "y": y}

    def training_step_end(self, outputs: Any) -> Tensor:
        return cross_entropy(outputs["logits"], outputs["y"])


#: name -> module, and whether it trains on several processes
MODULES: dict[str, tuple[type[TrainingModule], bool]] = {
    "torchmetrics": (Metered, True),
    "plateau": (Plateau, True),
    "two optimizers": (Rivals, True),
    "manual": (Manual, True),
    "draws in the step": (Drawing, True),
    "skips batches": (Skipping, False),
    "moody": (Moody, True),
    "training_step_end": (Handed, True),
}
