"""Optimizers, schedules and averages of libraries."""

from typing import Any

import pytorch_warmup
import schedulefree
import torch
import torch_optimizer
from ema_pytorch import EMA
from libraries.rows import Fitted, Row
from lightning.pytorch.callbacks import WeightAveraging
from lion_pytorch import Lion
from prodigyopt import Prodigy
from timm import optim as timm_optim
from timm import scheduler as timm_schedules
from timm.utils import ModelEmaV3
from torch_ema import ExponentialMovingAverage
from transformers import Adafactor, get_cosine_schedule_with_warmup


class ScheduleFree(Fitted):
    """Weights change with the mode: an average in validations."""

    kind: Any = schedulefree.AdamWScheduleFree

    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters(), lr=0.05, warmup_steps=3)

    def on_train_epoch_start(self) -> None:
        self.optimizers().train()

    def on_validation_epoch_start(self) -> None:
        self.optimizers().eval()

    def on_validation_epoch_end(self) -> None:
        self.optimizers().train()

    def on_train_end(self) -> None:
        self.optimizers().eval()


class ScheduleFreeSgd(ScheduleFree):
    kind = schedulefree.SGDScheduleFree


class ScheduleFreeR(ScheduleFree):
    def configure_optimizers(self) -> Any:
        return schedulefree.RAdamScheduleFree(self.parameters(), lr=0.05)


class Adaptive(Fitted):
    def configure_optimizers(self) -> Any:
        return Prodigy(self.parameters(), lr=1.0, safeguard_warmup=True, slice_p=2)


class Signs(Fitted):
    def configure_optimizers(self) -> Any:
        return Lion(self.parameters(), lr=0.01, decoupled_weight_decay=True)


class Orthogonal(Fitted):
    def configure_optimizers(self) -> Any:
        matrices = [one for one in self.parameters() if one.ndim == 2]
        rest = [one for one in self.parameters() if one.ndim != 2]
        return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()


class Switching(Fitted):
    def configure_optimizers(self) -> Any:
        return torch_optimizer.SWATS(self.parameters(), lr=0.05)


class Warmed(Fitted):
    """pytorch_warmup dampens each step's rate."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        self.warmup = pytorch_warmup.UntunedLinearWarmup(optimizer)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        with self.warmup.dampening():
            scheduler.step()


class TimmLamb(Fitted):
    """timm's optimizer and a schedule of its own, which counts updates."""

    kind = "lamb"

    def configure_optimizers(self) -> Any:
        optimizer = timm_optim.create_optimizer_v2(self, self.kind, lr=0.05, weight_decay=0.01)
        schedule = timm_schedules.CosineLRScheduler(optimizer, 12, warmup_t=3, noise_range_t=(4, 10), t_in_epochs=False)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step_update(num_updates=self.global_step)


class TimmLookahead(TimmLamb):
    kind = "lookahead_adamw"


class TimmKron(TimmLamb):
    kind = "kron"


class TimmEma(Fitted):
    def __init__(self) -> None:
        super().__init__()
        self.average = ModelEmaV3(self.net, decay=0.9, use_warmup=True)

    def on_train_batch_end(self, *_: Any) -> None:
        self.average.update(self.net, step=self.global_step)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_average", self.average(batch[0]).mean())


class OneEma(Fitted):
    """ema_pytorch, whose copy is made late and updated every second call."""

    def __init__(self) -> None:
        super().__init__()
        self.average = EMA(self.net, beta=0.9, update_after_step=3, update_every=2, power=3 / 4)

    def on_train_batch_end(self, *_: Any) -> None:
        self.average.update()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_average", self.average(batch[0]).mean())


class ShadowEma(Fitted):
    """torch_ema: lists of tensors and a count in an object that is no module; swapped in for validations."""

    def __init__(self) -> None:
        super().__init__()
        self.average = ExponentialMovingAverage(self.net.parameters(), decay=0.9)

    def on_train_batch_end(self, *_: Any) -> None:
        self.average.update()

    def on_validation_epoch_start(self) -> None:
        self.average.store()
        self.average.copy_to()

    def on_validation_epoch_end(self) -> None:
        self.average.restore()


class Averaged(Fitted):
    """The averages of the last epochs, under the rates that belong to them: Lightning's SWA, by its parts."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.02, anneal_epochs=1)]


class Factored(Fitted):
    def configure_optimizers(self) -> Any:
        optimizer = Adafactor(self.parameters(), scale_parameter=True, relative_step=True, warmup_init=True, lr=None)
        return optimizer


class Cosine(Fitted):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        schedule = get_cosine_schedule_with_warmup(optimizer, 3, 12)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


ROWS = {
    "schedulefree, AdamW": Row(ScheduleFree),
    "schedulefree, SGD": Row(ScheduleFreeSgd),
    "schedulefree, RAdam": Row(ScheduleFreeR),
    "prodigyopt": Row(Adaptive),
    "lion_pytorch": Row(Signs),
    "torch, Muon beside AdamW": Row(Orthogonal),
    "torch_optimizer, SWATS": Row(Switching),
    "pytorch_warmup": Row(Warmed),
    "timm, LAMB and cosine": Row(TimmLamb),
    "timm, Lookahead": Row(TimmLookahead),
    "timm, Kron": Row(TimmKron, draws=True),
    "timm, EMA": Row(TimmEma),
    "ema_pytorch": Row(OneEma),
    "torch_ema": Row(ShadowEma),
    "torch, SWALR and averages": Row(Averaged, callbacks=lambda: [WeightAveraging()]),
    "transformers, Adafactor": Row(Factored),
    "transformers, cosine": Row(Cosine),
}
