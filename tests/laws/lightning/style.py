"""Modules as people write them for Lightning, none with a line for midstride: one optimizer, left to the Trainer."""

from collections import deque
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score


def tensors(count: int = 24) -> TensorDataset:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(count))
    return TensorDataset(x, (x.sum(dim=1) > 0).long())


def loader(count: int = 24, **options: Any) -> DataLoader[Any]:
    return DataLoader(tensors(count), batch_size=4, **options)


class AutoEncoder(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        self.decoder = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4))

    def training_step(self, batch, batch_idx):
        x, _ = batch
        x = x.view(x.size(0), -1)
        loss = F.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Classifier(L.LightningModule):
    """The base of those below; also the form `configure_optimizers` takes as a dict with a monitor."""

    def __init__(self, hidden: int = 8, lr: float = 0.05, **kwargs):
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Sequential(nn.Linear(4, self.hparams.hidden), nn.Tanh(), nn.Linear(hidden, 2))
        self.train_acc = MulticlassAccuracy(num_classes=2)
        self.val_acc = MulticlassAccuracy(num_classes=2)

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.train_acc(logits, y)
        self.log("train_acc", self.train_acc, on_step=True, on_epoch=True, prog_bar=True)
        self.log("train_loss", loss, True, logger=True, rank_zero_only=False)
        return {"loss": loss, "logits": logits.detach()}

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.val_acc.update(logits, y)
        self.log("val_acc", self.val_acc, prog_bar=True)
        self.log("val_loss", F.cross_entropy(logits, y), on_epoch=True, sync_dist=True, batch_size=x.size(0))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams["lr"], momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss", "strict": True}}


class TwoLists(Classifier):
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}]


class OneCycle(Classifier):
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        total = self.trainer.estimated_stepping_batches
        assert total == self.trainer.max_epochs * self.trainer.num_training_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=total)
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "name": "rate"}]


class Outputs(Classifier):
    """Keeps what its steps return, as Lightning 2 asks of those that had `..._epoch_end`."""

    def __init__(self):
        super().__init__()
        self.outputs = []
        self.means = []

    def validation_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.outputs.append(loss)
        return loss

    def on_validation_epoch_end(self):
        mean = torch.stack(self.outputs).mean()
        self.means.append(mean.item())
        self.log("val_loss", mean)
        self.outputs.clear()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.trainer.is_last_batch and self.trainer.is_global_zero:
            self.seen = (self.global_step, outputs["logits"].shape[0])

    def on_train_epoch_end(self):
        self.log("rate", self.optimizers().param_groups[0]["lr"])
        loss = self.trainer.callback_metrics["val_loss"].item()
        self.print(f"epoch {self.current_epoch} of {self.trainer.max_epochs}: {loss:.3f}")


class Backbone(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU())

    def forward(self, x):
        return self.body(x)


class Transfer(Classifier):
    """A frozen LightningModule within it, which thaws in the second epoch."""

    def __init__(self):
        super().__init__()
        self.backbone = Backbone()
        self.backbone.freeze()
        self.head = nn.Linear(8, 2)
        del self.model

    def forward(self, x):
        return self.head(self.backbone(x))

    def on_train_epoch_start(self):
        if self.current_epoch == 0:
            self.backbone.eval()
        else:
            self.backbone.unfreeze()

    def configure_optimizers(self):
        groups = [{"params": self.head.parameters()}, {"params": self.backbone.parameters(), "lr": 1e-3}]
        return torch.optim.Adam(groups, lr=self.hparams.lr)


class Collection(Classifier):
    def __init__(self):
        super().__init__()
        metrics = MetricCollection({"acc": MulticlassAccuracy(2), "f1": MulticlassF1Score(2)})
        self.metrics = nn.ModuleDict(
            {"of_train": metrics.clone(prefix="train/"), "of_val": metrics.clone(prefix="val/")}
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.log_dict(self.metrics["of_train"](logits, y), on_step=True)
        return F.cross_entropy(logits, y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.metrics["of_val"].update(self(x), y)
        self.log("val_loss", F.cross_entropy(self(x), y), reduce_fx=torch.mean)

    def on_validation_epoch_end(self):
        self.log_dict(self.metrics["of_val"].compute())
        self.metrics["of_val"].reset()


class Several(Classifier):
    """Dict of training loaders, list of validation loaders."""

    def training_step(self, batch, batch_idx):
        (a, _), (b, y) = batch["a"], batch["b"]
        loss = F.cross_entropy(self(b), y) + self(a).pow(2).mean()
        self.log_dict({"loss": loss, "half": loss / 2})
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y))

    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=self.hparams.lr)]

    def train_dataloader(self):
        return {"a": loader(24), "b": loader(24)}

    def val_dataloader(self):
        return [loader(8), loader(12)]


class Averaged(AutoEncoder):
    """Stochastic weight averaging by torch's own class."""

    def __init__(self):
        super().__init__()
        self.average = AveragedModel(self.encoder)

    def on_train_epoch_end(self):
        self.average.update_parameters(self.encoder)

    def configure_optimizers(self):
        return torch.optim.Adam([*self.encoder.parameters(), *self.decoder.parameters()], lr=1e-2)


class Momentum(AutoEncoder):
    """A momentum encoder and a queue in a buffer, as contrastive learning has them."""

    def __init__(self):
        super().__init__()
        self.slow = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).requires_grad_(False)
        self.register_buffer("queue", torch.ones(8, 2))
        self.register_buffer("head", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _enqueue(self, keys):
        head = int(self.head)
        self.queue[head : head + len(keys)] = keys
        self.head[0] = (head + len(keys)) % len(self.queue)
        for fast, slow in zip(self.encoder.parameters(), self.slow.parameters(), strict=True):
            slow.mul_(0.9).add_(fast, alpha=0.1)

    def training_step(self, batch, batch_idx):
        codes, keys = self.encoder(batch[0]), self.slow(batch[0])
        self._enqueue(keys)
        return -(codes @ self.queue.clone().T).logsumexp(dim=1).mean() + codes.pow(2).mean()


class Noisy(Classifier):
    """Dropout, a shuffled loader, noise in the data: what Lightning's resume changes."""

    def __init__(self):
        super().__init__()
        self.model.append(nn.Dropout(0.3))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self(x + 0.1 * torch.randn_like(x)), y)

    def train_dataloader(self):
        return loader(24, shuffle=True)

    def val_dataloader(self):
        return loader(8)


class Replayed(IterableDataset):
    """What a buffer has when an epoch begins, newest first."""

    def __init__(self, buffer):
        self.buffer = buffer

    def __iter__(self):
        yield from [*self.buffer][::-1]


class Replay(AutoEncoder):
    """Fills the buffer that it trains on, as in reinforcement learning."""

    def __init__(self):
        super().__init__()
        self.buffer = deque(((x,) for x, _ in tensors(24)), maxlen=24)

    def training_step(self, batch, batch_idx):
        self.buffer.append((self.decoder(self.encoder(batch[0]))[0].detach(),))
        return super().training_step((*batch, None), batch_idx)

    def train_dataloader(self):
        return DataLoader(Replayed(self.buffer), batch_size=4)


class Generated(IterableDataset):
    """What a generator of the module's gives, as in Lightning's examples of reinforcement learning."""

    def __init__(self, generate_batch):
        self.generate_batch = generate_batch

    def __iter__(self):
        return self.generate_batch()


class Acting(AutoEncoder):
    """Acts with the weights that it trains, and trains on what comes of it."""

    def __init__(self):
        super().__init__()
        self.acts, self.state = 0, torch.ones(4)

    def act(self):
        for _ in range(22):
            self.acts += 1
            self.state = torch.sin(self.acts + self.state + self.decoder(self.encoder(self.state)).detach())
            yield (self.state,)

    def training_step(self, batch, batch_idx):
        return super().training_step((*batch, None), batch_idx)

    def train_dataloader(self):
        return DataLoader(Generated(self.act), batch_size=4)
