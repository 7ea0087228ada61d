"""Modules as people write them for Lightning that put methods of their own in place of its."""

import torch
from laws.lightning.style import Classifier, Several, loader
from lightning.pytorch.callbacks import Callback, EarlyStopping
from lightning.pytorch.utilities import CombinedLoader


class Warmup(Classifier):
    """Has the step, its closure, the zeroing, the backward pass and the schedule in its own hands."""

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)]

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)
        if self.trainer.global_step < 4:
            for group in optimizer.param_groups:
                group["lr"] = self.hparams.lr * min(1.0, (self.trainer.global_step + 1) / 4)

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)

    def backward(self, loss):
        loss.backward(retain_graph=False)

    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step(epoch=self.current_epoch)


class Clipped(Classifier):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        largest = 0.1 if self.current_epoch else 0.5
        self.clip_gradients(optimizer, gradient_clip_val=largest, gradient_clip_algorithm="norm")

    def on_before_optimizer_step(self, optimizer):
        norms = [p.grad.norm(2) for p in self.parameters() if p.grad is not None]
        self.log("grad_norm", torch.stack(norms).norm(2), on_step=True, on_epoch=False)


class Checkpointed(Classifier):
    def __init__(self):
        super().__init__()
        self.seen = 0

    def training_step(self, batch, batch_idx):
        self.seen += len(batch[0])
        return super().training_step(batch, batch_idx)["loss"] * (1 + self.seen / 100)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["seen"] = {"samples": self.seen, "at": (checkpoint["epoch"], checkpoint["global_step"])}
        checkpoint["state_dict"] = {name: p for name, p in checkpoint["state_dict"].items() if "bias" not in name}

    def on_load_checkpoint(self, checkpoint):
        assert tuple(checkpoint["seen"]["at"]) == (checkpoint["epoch"], checkpoint["global_step"])
        self.seen = checkpoint["seen"]["samples"]
        checkpoint["state_dict"] |= {name: p for name, p in self.named_parameters() if "bias" in name}


class Prefixed(Classifier):
    """Logs under names of its own, and looks at the loss that its step returned."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)["loss"]

    def log(self, name, value, *args, **kwargs):
        super().log(f"mine/{name}", value, *args, **kwargs)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if outputs["loss"] > 0.3:
            for group in self.optimizers().param_groups:
                group["lr"] *= 1 + float(outputs["loss"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


class SideBySide(Several):
    """Lightning's own CombinedLoader."""

    def train_dataloader(self):
        return CombinedLoader({"a": loader(24), "b": loader(12)}, mode="max_size_cycle")


class Halving(Callback):
    """Halves the rate in each epoch but the first, with a count that is its state."""

    def __init__(self):
        self.epochs = 0

    def on_train_epoch_end(self, trainer, pl_module):
        self.epochs += 1
        if self.epochs > 1:
            pl_module.optimizers().param_groups[0]["lr"] /= 2

    def state_dict(self):
        return {"epochs": self.epochs}

    def load_state_dict(self, state_dict):
        self.epochs = state_dict["epochs"]


class Configured(Classifier):
    """Brings a callback of its own, and another in place of the Trainer's."""

    def configure_callbacks(self):
        return [Halving(), EarlyStopping("val_loss", patience=1, min_delta=10.0)]
