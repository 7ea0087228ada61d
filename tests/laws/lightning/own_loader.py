"""Loops of others over a StatefulDataLoader, stopped in the middle of an epoch. Called in forks."""

import json
import logging
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from midstride.engine.data import StatefulDataLoader

SAMPLES, BATCH = 22, 4
STEPS, STOP = 12, 8


class Noisy(Dataset[Tensor]):
    """Samples that say who they are, with a number that is drawn for each."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index), torch.rand(()).item()])


def read_on(by: str, folder: Path) -> None:
    """Write, for both loaders, whether stopped and resumed reads what is read without a stop, on this rank."""
    warnings.simplefilter("ignore")
    loaders = {"plain": DataLoader, "stateful": StatefulDataLoader}
    alike = {}
    for name, make in loaders.items():
        checkpoint = folder / f"{name}.ckpt"
        whole = LOOPS[by](make, STEPS, folder)
        first = LOOPS[by](make, STOP, folder, save=checkpoint)
        rest = LOOPS[by](make, STEPS, folder, load=checkpoint)
        alike[name] = first + rest == whole
        assert len(whole) == STEPS
    (folder / f"alike-{os.environ['RANK']}.json").write_text(json.dumps(alike))


Batches = list[list[float]]


def lightning_reads(make: Any, steps: int, folder: Path, save: Path | None = None, load: Path | None = None) -> Batches:
    """Return the batches that Lightning's Trainer gives to the training step up to step `steps`."""
    import lightning

    batches: Batches = []

    class Reader(lightning.LightningModule):
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


def accelerate_reads(
    make: Any, steps: int, folder: Path, save: Path | None = None, load: Path | None = None
) -> Batches:
    """Return the batches that a loop of Accelerate's reads on this rank, resumed as its guide says."""
    from accelerate import Accelerator

    batches: Batches = []
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    loader = make(Noisy(), BATCH, shuffle=True)
    layer = torch.nn.Linear(2, 1)
    layer, optimizer, prepared = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), 1e-3), loader)
    has_state, done, own = hasattr(loader, "state_dict"), 0, f"loader-{accelerator.process_index}.pt"
    if load is not None:
        done = STOP
        accelerator.load_state(str(load))
        if has_state:
            loader.load_state_dict(torch.load(load / own))
        else:
            prepared = accelerator.skip_first_batches(prepared, STOP % len(prepared))
    while True:
        for batch in prepared:
            batches.append(batch.flatten().tolist())
            accelerator.backward(layer(batch).mean())
            optimizer.step()
            optimizer.zero_grad()
            if done + len(batches) == steps:
                if save is not None:
                    accelerator.save_state(str(save))
                    torch.save(loader.state_dict() if has_state else None, save / own)
                return batches


def windows(folder: Path) -> None:
    """Write, for both loaders, the steps and the last weight of a loop of Accelerate's that accumulates gradients."""
    from accelerate import Accelerator

    found = {}
    for name, make in {"plain": DataLoader, "stateful": StatefulDataLoader}.items():
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        layer = torch.nn.Linear(1, 1)
        data = TensorDataset(torch.arange(28.0).reshape(28, 1) / 28)
        layer, optimizer, loader = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), 0.1), make(data, 4))
        steps = []
        for _ in range(2):
            for (x,) in loader:
                with accelerator.accumulate(layer):
                    accelerator.backward(layer(x).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
                steps.append(accelerator.sync_gradients)
        found[name] = [steps, next(layer.parameters()).item()]
    (folder / "windows.json").write_text(json.dumps(found))


def gathered(cases: list[tuple[int, int]], folder: Path) -> None:
    """Write, for each number of samples and batch size, what `gather_for_metrics` returns over both loaders.

    With the warnings of midstride's.
    """
    from accelerate import Accelerator

    warned: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())
    logging.getLogger("midstride").addHandler(handler)
    told: list[dict[str, Any]] = []
    for samples, batch in cases:
        accelerator, found = Accelerator(cpu=True), {}
        for name, make in {"plain": DataLoader, "stateful": StatefulDataLoader}.items():
            loader = accelerator.prepare(make(TensorDataset(torch.arange(float(samples))), batch))
            found[name] = sorted(int(x) for (part,) in loader for x in accelerator.gather_for_metrics(part))
        told.append({**found, "warned": [*warned]})
        warned.clear()
    (folder / f"gathered-{os.environ['RANK']}.json").write_text(json.dumps(told))


LOOPS = {"lightning": lightning_reads, "accelerate": accelerate_reads}
