"""Trainings for the checks: nets that draw random numbers on their device in every step, and faults that end them."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from midstride.engine import Callback, Trainer, TrainingModule

__all__ = ["NETS", "Count", "Net", "NoWait", "files", "fit", "life"]

STEPS, DEATH, SIDE, CLASSES = 24, 9, 8, 10


class Recurrent(nn.Module):
    """Reads the rows of an image one after the other, in two layers.

    Args:
        dropout: of the first layer's output, drawn by the layer.
    """

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.lstm = nn.LSTM(SIDE, 16, num_layers=2, batch_first=True, dropout=dropout)
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(16, CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of each image."""
        out: Tensor = self.head(self.lstm(images[:, 0])[0][:, -1])
        return out


def _convolution(*extra: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.Dropout(0.5), *extra, nn.Flatten(), nn.LazyLinear(CLASSES))


def _attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(SIDE, 2, 32, dropout=0.3, batch_first=True)
    return nn.Sequential(nn.Flatten(1, 2), nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.LazyLinear(CLASSES))


def _normalised() -> nn.Module:
    return _convolution(nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout2d(0.2))


#: by name
NETS: dict[str, Callable[[], nn.Module]] = {
    "convolution": _convolution,
    "normalised": _normalised,
    "attention": _attention,
    "recurrent": lambda: Recurrent(0.0),
    "recurrent with dropout": lambda: Recurrent(0.5),
    "compiled": lambda: _compiled(_convolution(nn.GELU())),
    "compiled to graphs": lambda: _compiled(_convolution(nn.GELU()), mode="reduce-overhead"),
    "wide": lambda: _convolution(nn.Flatten(), nn.Linear(288, 1 << 15), nn.Dropout(0.1)),
    "adaptive": lambda: _convolution(nn.AdaptiveAvgPool2d(2)),
}


def _compiled(net: nn.Module, **options: Any) -> nn.Module:
    net(torch.zeros(2, 1, SIDE, SIDE))
    compiled: nn.Module = torch.compile(net, **options)
    return compiled


class Net(TrainingModule):
    """Draws random numbers on its device in every step.

    Args:
        net: one of `NETS`.
        has_extras: whether it has a generator of its own and an average, which come up in training.
        optimizer: arguments of AdamW.
    """

    def __init__(self, net: str = "convolution", *, has_extras: bool = True, **optimizer: Any) -> None:
        super().__init__()
        self.net = NETS[net]()
        self.net(torch.zeros(2, 1, SIDE, SIDE))
        self.mean = torch.zeros(())
        self.has_extras = has_extras
        self.generator: torch.Generator | None = None
        self._optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        noise = self._noise(batch[0].shape) if self.has_extras else 0
        loss = nn.functional.cross_entropy(self.net(batch[0] + noise), batch[1])
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        return loss

    def _noise(self, shape: torch.Size) -> Tensor:
        if self.generator is None:
            self.generator = torch.Generator(self.device).manual_seed(3)
        return 0.1 * torch.randn(shape, generator=self.generator, device=self.device)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the loss of a batch."""
        self.log("val/loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Have on the device what was built on the host, and is no weight."""
        if not self.has_extras:
            return
        self.mean = self.mean.to(self.device) * 0.9 + batch[0].to(self.device).mean()
        self.log("mean", self.mean, on_step=True, on_epoch=True)

    def configure_optimizers(self) -> Any:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), **{"fused": False, **self._optimizer})


class Count(TrainingModule):
    """Checks the elements of each batch on the device after a long computation, to detect memory reused too early."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(width))
        self.register_buffer("wrong", torch.zeros((), dtype=torch.long))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return a loss; count the elements that differ from those of the batch."""
        work = self.weight
        for _ in range(20):
            work = work @ self.weight
        self.wrong += (batch[0] != batch_idx).sum()
        return work.mean() + batch[0].mean()

    def configure_optimizers(self) -> Any:
        """Return an optimizer that changes nothing."""
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Average(Callback):
    """Keeps a running average of batches on the device, as state in snapshots."""

    def __init__(self) -> None:
        self._mean: Tensor | None = None

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Add the batch."""
        seen = batch[0].flatten(1).mean(1)
        self._mean = seen if self._mean is None else self._mean * 0.9 + seen
        module.log("average", self._mean.mean())

    def state_dict(self) -> dict[str, Any]:
        """Return the average."""
        return {"mean": self._mean}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore the average."""
        self._mean = state_dict["mean"]


class Die(Callback):
    """Kills the last rank."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Die after a fixed batch."""
        if batch_idx == DEATH and trainer.world.rank == trainer.world.size - 1:
            os._exit(9)


class Index(Callback):
    """Indexes a row that does not exist, on the device, which raises an error asynchronously."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Read it after a fixed batch."""
        if batch_idx == DEATH:
            nn.functional.embedding(torch.tensor([5], device=module.device), torch.zeros(2, 2, device=module.device))


class Fill(Callback):
    """Allocates more memory than any device has."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Allocate it after a fixed batch."""
        if batch_idx == DEATH:
            torch.empty(1 << 45, device=module.device)


class NoWait(Callback):
    """Makes torch raise if the host waits for the GPU, from the second step on."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Switch it on."""
        torch.cuda.set_sync_debug_mode("error" if batch_idx else "default")

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Allow waits between two steps."""
        torch.cuda.set_sync_debug_mode("default")


_ENDS: dict[str, type[Callback]] = {"dies": Die, "reads beyond": Index, "fills memory": Fill}


def fit(
    run: str | None,
    *,
    end: str | None = None,
    net: str = "convolution",
    optimizer: dict[str, Any] | None = None,
    loader: dict[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    cudnn: bool = True,
    touches_cuda: bool = False,
    has_extras: bool = True,
    **options: Any,
) -> None:
    """Fit a net for an epoch, with the same seed, net and data in every process.

    Args:
        run: folder of the run; None stores nothing.
        end: fault that ends the fit early; None for none.
        net: one of `NETS`.
        optimizer: arguments of AdamW.
        loader: arguments of the DataLoader.
        callbacks: callbacks of the Trainer.
        cudnn: whether cuDNN is used.
        touches_cuda: whether CUDA is used in this process before the fit.
        has_extras: whether the net has a generator and an average of its own, and a callback has an average.
        options: options of the Trainer.
    """
    torch.backends.cudnn.enabled = cudnn
    if touches_cuda:
        torch.zeros(1, device="cuda")
    extras = [Average()] if has_extras else []
    ends = [] if end is None else [_ENDS[end]()]
    trainer = Trainer(
        **{"max_epochs": 1, "seed": 7, "enable_progress_bar": False, "snapshots": {"every_steps": 5}, **options},
        callbacks=[*callbacks, *extras, *ends],
    )
    drawn = torch.Generator().manual_seed(1)
    samples = STEPS * 8
    data = TensorDataset(torch.randn(samples, 1, SIDE, SIDE, generator=drawn), torch.arange(samples) % CLASSES)
    training = DataLoader(data, batch_size=8, shuffle=True, **(loader or {}))
    module = Net(net, has_extras=has_extras, **(optimizer or {}))
    trainer.fit(module, training, DataLoader(data, batch_size=64), run=run)


def life(run: Path, *, end: str | None = None, ranks: int = 0, visible: str | None = None, **options: Any) -> int:
    """Fit `run` in a new process, or in ranks under torchrun, and return the exit code; its output goes to a log file.

    Args:
        run: folder of the run; the log is beside it, with the suffix .log.
        end: fault that ends the fit early; None for none.
        ranks: number of ranks under torchrun; 0 for one process without torchrun.
        visible: value of `CUDA_VISIBLE_DEVICES`; None for all GPUs.
        options: options of `fit`.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    wanted = json.dumps({"run": str(run), "end": end, **options})
    environment = os.environ | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    with run.with_suffix(".log").open("a") as log:
        command = [sys.executable, *torchrun, __file__, wanted]
        return subprocess.run(command, check=False, env=environment, stdout=log, stderr=log).returncode


def files(run: Path) -> list[bytes]:
    """Return the content of the metric log and of the last weights of `run`."""
    return [(run / "metrics.csv").read_bytes(), *(p.read_bytes() for p in sorted(run.glob("last/*.safetensors")))]


if __name__ == "__main__":
    fit(**json.loads(sys.argv[1]))
