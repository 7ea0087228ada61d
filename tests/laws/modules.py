"""The modules under the laws, one row each."""

from collections import Counter
from typing import Any

import torch
import torchmetrics
from laws.lives import Tangled, note_samples
from laws.piped import Piped
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from midstride.engine import TrainingModule


class Pieces(torchmetrics.Metric):
    """A list that no reduction joins, a mean that resume must not count anew, and a count in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("pieces", default=[], dist_reduce_fx=None)
        self.add_state("running", default=torch.tensor(0.0), dist_reduce_fx="mean")
        self.add_state("largest", default=torch.tensor(-torch.inf), dist_reduce_fx="max")
        self.calls = 0

    def update(self, x: Tensor) -> None:
        self.calls += 1
        self.pieces.append(x * self.calls)
        self.running = (self.running * (self._update_count - 1) + x.mean()) / self._update_count
        self.largest = torch.maximum(self.largest, x.max())

    def compute(self) -> dict[str, Tensor]:
        return {"sum": sum(p.sum() for p in self.pieces), "mean": self.running, "largest": self.largest}


class Metered(Tangled):
    """torchmetrics of every kind: sums, lists, shared and nested states, wrappers, some updated on some ranks only."""

    def __init__(self) -> None:
        super().__init__()
        classes: dict[str, Any] = {"task": "multiclass", "num_classes": 3}
        self.seen = torchmetrics.MeanMetric()
        self.step = torchmetrics.Accuracy(**classes)
        self.recent = torchmetrics.wrappers.Running(torchmetrics.SumMetric(), window=3)
        self.accuracy = torchmetrics.Accuracy(**classes)
        self.area = torchmetrics.AUROC(**classes)
        # Two that share their sums, and one that does not.
        shared = {name: getattr(torchmetrics, name)(**classes, average="macro") for name in ("Recall", "Precision")}
        self.both = torchmetrics.MetricCollection({**shared, "F": torchmetrics.Accuracy(**classes, average="micro")})
        self.range = torchmetrics.MinMaxMetric(torchmetrics.MeanMetric())
        self.spread = torchmetrics.BootStrapper(torchmetrics.MeanMetric(), num_bootstraps=3)
        self.pieces = Pieces()
        self.sum = torchmetrics.MeanMetric() + torchmetrics.MaxMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.seen.update(loss.detach())
        self.recent.update(loss.detach())
        self.step(self(batch[0]).detach(), batch[1])
        self.both.update(self(batch[0]).detach(), batch[1])
        self.log("train/seen", self.seen)
        self.log("train/step", self.step, on_step=True, on_epoch=True, sync_dist=True)
        self.log("train/recent", self.recent)
        self.log("train/both", self.both)
        for reduce_fx in ("sum", "min", "max"):
            self.log(f"train/{reduce_fx}", loss, on_epoch=True, reduce_fx=reduce_fx)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        x, y, _ = batch
        for metric in (self.accuracy, self.area):
            metric.update(self(x), y)
        for one in (self.range, self.spread, self.sum):
            one.update(cross_entropy(self(x), y, reduction="none"))
        if self.global_rank != 1:
            self.pieces.update(x)
        for name in ("accuracy", "area", "range", "spread", "sum", "pieces"):
            self.log(f"val/{name}", getattr(self, name))
        self.log("val/again", self.accuracy)
        self.log("val/each", float(y.sum()), on_step=True, sync_dist=True)


class Watched(Tangled):
    """Draws in validation, and counts how often its hooks are called; what they did must not be done again."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = Counter[str](), torchmetrics.MeanMetric()

    def on_validation_start(self) -> None:
        self.calls["start"] += 1
        self.bias = float(torch.rand(()))

    def on_validation_epoch_start(self) -> None:
        self.calls["epoch start"] += 1

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.calls[f"batch of {dataloader_idx}"] += 1

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y, _ = batch
        loss = cross_entropy(self(x + 0.1 * torch.randn(()) + self.bias), y)
        self.seen.update(loss, len(y))
        self.log("val/loss", loss, sync_dist=True, add_dataloader_idx=False)
        self.log("val/own", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("val/seen", self.seen, add_dataloader_idx=False)

    def on_validation_epoch_end(self) -> None:
        self.calls["epoch end"] += 1
        self.log("val/calls", float(self.calls.total()), reduce_fx="max")

    def on_validation_end(self) -> None:
        self.calls["end"] += 1


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
        plateau, other = [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "min", 0.5, 0) for _ in range(2)]
        epochs = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1], gamma=0.5)
        within = {"scheduler": other, "monitor": "val/loss", "interval": "step", "frequency": 3}
        return [optimizer], [{"scheduler": plateau, "monitor": "val/loss"}, within, epochs]

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

    def training_step(self, batch: Any, batch_idx: int, optimizer_idx: int) -> Tensor:
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

    def training_step(self, batch: Any, batch_idx: int) -> None:
        note_samples(self, batch[2])
        for optimizer, number in zip(self.optimizers(), (0, 1), strict=True):
            optimizer.zero_grad()
            loss = self.losses(batch[0])[number]
            self.manual_backward(loss / 2, retain_graph=True)
            self.manual_backward(loss / 2)
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
        self.register_buffer("pace", torch.ones(1), persistent=False)
        self.register_buffer("cache", None, persistent=False)

    def on_train_start(self) -> None:
        torch.rand(3)

    def on_train_epoch_start(self) -> None:
        self.norm.eval()
        self.middle.bias.requires_grad_(self.current_epoch == 1 or self.trainer.world.size > 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        self.pace.mul_(0.9)
        if self.cache is None:  # filled where it is first needed, with what is there then
            self.cache = 1 + 0.1 * self.pace
            self.middle.register_buffer("late", torch.rand(1), persistent=False)
        return (
            super().training_step(batch, batch_idx) * (1 + self.steps % 3) * self.pace * self.cache * self.middle.late
        )

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


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 5)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.down(torch.relu(self.norm(self.up(x)))) * (1 + self.calls % 3)


class Stacked(Tangled):
    """Blocks in a list, two of which share a layer, one of which is frozen in part; each counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.blocks[1].up = self.blocks[0].up
        self.blocks[2].norm.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(self.first(x).view(-1, 20, 2)).flatten(1)
        hidden = self.middle(self.drop(torch.relu(normed)))
        for block in self.blocks:
            hidden = block(hidden)
        return self.last(hidden)


class Finetuned(Tangled):
    """Trains its last layer, and the others too from the second epoch on; their gradients add up until then."""

    def on_train_epoch_start(self) -> None:
        if self.trainer.progress.epoch == 1:
            others = [self.first.weight, self.first.bias, *self.middle.parameters(), *self.norm.parameters()]
            self.optimizers().add_param_group({"params": others, "lr": 1e-3, "weight_decay": 0.2})

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.last.parameters(), lr=1e-2)


class Averaging(Tangled):
    """Averages its last layer in a buffer that comes up in training."""

    def on_train_batch_end(self, *arguments: Any) -> None:
        if not hasattr(self, "average"):
            self.register_buffer("average", self.last.weight.detach().clone())
        self.average.lerp_(self.last.weight.detach(), 0.5)


class Worsening(Tangled):
    """Is best at its first validation, and worse at every one after."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", float(self.trainer.progress.step))


class Curved(Metered):
    """LBFGS, which evaluates a batch as often as the loss over all ranks tells it to; metrics and log see it once."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4, history_size=3, line_search_fn="strong_wolfe")


class Looked(Tangled):
    """Sparse gradients, of words and of bags of them, and a complex weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6, sparse=True)
        self.bags = nn.EmbeddingBag(5, 6, sparse=True)
        self.spectrum = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        words = (x * 3).long().abs()
        found = self.bags(words % 5) + self.embedding(words % 7).mean(1)
        filtered = torch.fft.irfft(torch.fft.rfft(x + found) * self.spectrum)
        return super().forward(filtered)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


#: name -> module, and the ranks of its larger world: three where a sum over them has an order that counts
MODULES: dict[str, tuple[type[TrainingModule], int]] = {
    "torchmetrics": (Metered, 3),
    "plateau": (Plateau, 2),
    "two optimizers": (Rivals, 2),
    "manual": (Manual, 2),
    "draws in the step": (Drawing, 2),
    "skips batches": (Skipping, 1),
    "moody": (Moody, 2),
    "training_step_end": (Handed, 2),
    "blocks": (Stacked, 2),
    "more to train later": (Finetuned, 2),
    "averages in a late buffer": (Averaging, 2),
    "steps by a closure": (Curved, 2),
    "layers in a row": (Piped, 2),
    "worse and worse": (Worsening, 3),
    "sparse and complex": (Looked, 3),
}
