"""Lightning's own Trainer over a StatefulDataLoader, stopped in the middle of an epoch. Called in a fork."""

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from midstride.engine.data import StatefulDataLoader

SAMPLES, BATCH = 22, 4
STEPS, STOP = 12, 8


class Noisy(Dataset[Tensor]):
    """Samples that say who they are, with a number that is drawn for each."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index), torch.rand(()).item()])


def read_on(folder: Path) -> None:
    """Write, for both loaders, whether stopped and resumed reads what is read without a stop."""
    warnings.simplefilter("ignore")
    loaders = {"plain": DataLoader, "stateful": StatefulDataLoader}
    alike = {}
    for name, make in loaders.items():
        checkpoint = folder / f"{name}.ckpt"
        whole = read(make, STEPS, folder)
        first = read(make, STOP, folder, save=checkpoint)
        rest = read(make, STEPS, folder, load=checkpoint)
        assert len(whole) == STEPS
        alike[name] = first + rest == whole
    (folder / "alike.json").write_text(json.dumps(alike))


def read(make: Any, steps: int, folder: Path, save: Path | None = None, load: Path | None = None) -> list[list[float]]:
    """Return the batches that Lightning's Trainer gives to the training step up to step `steps`."""
    import lightning

    batches: list[list[float]] = []

    class Reader(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 1e-3)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            batches.append(batch.flatten().tolist())
            return self.layer(batch).mean()

    torch.manual_seed(0)
    quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing", "logger"), False)
    trainer = lightning.Trainer(max_steps=steps, accelerator="cpu", default_root_dir=folder, **quiet)
    trainer.fit(Reader(), make(Noisy(), BATCH, shuffle=True), ckpt_path=load)
    if save is not None:
        trainer.save_checkpoint(save)
    return batches
