"""Callbacks and data as people write them for Lightning, none with a line for midstride."""

import lightning as L
import torch
from laws.lightning.style import tensors
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, random_split


class EMA(Callback):
    """The exponential moving average that people write, with its state."""

    def __init__(self, decay: float = 0.9):
        self.decay = decay
        self.shadow: dict[str, Tensor] = {}

    def setup(self, trainer, pl_module, stage):
        self.shadow = {name: p.detach().clone() for name, p in pl_module.named_parameters()}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        for name, parameter in pl_module.named_parameters():
            self.shadow[name].mul_(self.decay).add_(parameter.detach(), alpha=1 - self.decay)

    def on_train_end(self, trainer, pl_module):
        pl_module.load_state_dict(self.shadow, strict=False)

    def state_dict(self):
        return {"shadow": self.shadow}

    def load_state_dict(self, state_dict):
        self.shadow = state_dict["shadow"]


class Stopper(Callback):
    def on_validation_end(self, trainer, pl_module):
        if trainer.callback_metrics["val_loss"] < 10 and trainer.global_step >= 6:
            trainer.should_stop = True


class Cut(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __getitem__(self, index):
        return self.rows[index]

    def __len__(self):
        return len(self.rows)


class Parts(L.LightningDataModule):
    """`prepare_data`, `setup(stage)`, hyperparameters, a split, a change of batches on the device."""

    def __init__(self, batch_size: int = 4, scale: float = 0.5):
        super().__init__()
        self.save_hyperparameters()

    def prepare_data(self):
        tensors(32)  # as if downloaded, by one process of each machine

    def setup(self, stage=None):
        whole = tensors(32)
        self.train_set, self.val_set = random_split(whole, [24, 8], generator=torch.Generator().manual_seed(42))
        if stage == "fit":
            self.share = self.hparams.batch_size // self.trainer.world_size

    def train_dataloader(self):
        return DataLoader(Cut(self.train_set), batch_size=self.share)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=self.hparams.batch_size)

    def predict_dataloader(self):
        return self.val_dataloader()

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return (x * self.hparams.scale if self.trainer.training else x), y
