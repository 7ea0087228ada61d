"""Journal of an attempt: digests of all batches of the training step, sample by sample."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import xxhash
from torch import Tensor

from midstride.engine.modules.callbacks import Callback
from midstride.engine.trees import items_of, samples_in

if TYPE_CHECKING:
    from midstride.engine.modules.interface import TrainerInterface
    from midstride.engine.modules.module import TrainingModule
    from midstride.engine.training.trainer import Trainer

__all__ = ["BatchJournal", "first_difference"]

Entry = dict[str, Any]


class BatchJournal(Callback):
    """Writes a line for each training batch.

    Args:
        path: the file to append to.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_batch_start(
        self, trainer: "TrainerInterface", module: "TrainingModule", batch: Any, batch_idx: int
    ) -> None:
        """Write a line with the digests of `batch`."""
        fit = cast("Trainer", trainer).last_fit
        given = fit.context.loaders.training.last_indices if fit is not None else None
        digests, rest = _digests(batch)
        entry = {"epoch": trainer.progress.epoch, "batch": batch_idx, "samples": digests, "rest": rest}
        with self._path.open("a") as file:
            file.write(json.dumps({**entry, "indices": None if given is None else list(given)}) + "\n")


def first_difference(undisturbed: Path, resumed: Path) -> str | None:
    """Return a message on the first different batch of a resumed attempt; None without one."""
    was = {(entry["epoch"], entry["batch"]): entry for entry in _entries(undisturbed)}
    for entry in _entries(resumed):
        where = f"batch {entry['batch']} of epoch {entry['epoch']}"
        before = was.get((entry["epoch"], entry["batch"]))
        if before is None:
            return f"{where} was not read undisturbed"
        if before["indices"] != entry["indices"]:
            return f"{where} holds the samples {entry['indices']} resumed, {before['indices']} undisturbed"
        if len(before["samples"]) != len(entry["samples"]):
            return f"{where} holds {len(entry['samples'])} samples resumed, {len(before['samples'])} undisturbed"
        for index, (a, b) in enumerate(zip(before["samples"], entry["samples"], strict=True)):
            if a != b:
                indices = entry["indices"] or ()
                sample = f"sample {indices[index]}" if len(indices) == len(entry["samples"]) else "a sample"
                return f"{sample} in {where} differs: reading it again gave other data"
        if before["rest"] != entry["rest"]:
            return f"{where} differs in its content beside samples"
    return None


def _entries(path: Path) -> Iterator[Entry]:
    return map(json.loads, path.read_text().splitlines()) if path.exists() else iter(())


def _digests(batch: Any) -> tuple[list[str], str]:
    """Return a digest per sample, over all parts with a row per sample, and one of the rest."""
    samples = samples_in(batch)
    of_samples = [xxhash.xxh3_64() for _ in range(samples)]
    rest = xxhash.xxh3_64()
    for leaf in _leaves(batch):
        if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == samples:
            for digest, row in zip(of_samples, leaf, strict=True):
                digest.update(_bytes(row))
        elif isinstance(leaf, (list, tuple)) and len(leaf) == samples:  # such as a list of texts
            for digest, item in zip(of_samples, leaf, strict=True):
                digest.update(repr(item).encode())
        else:
            rest.update(_bytes(leaf) if isinstance(leaf, Tensor) else repr(leaf).encode())
    return [digest.hexdigest() for digest in of_samples], rest.hexdigest()


def _leaves(batch: Any) -> Iterator[Any]:
    """Yield the leaves of a nested batch. A container of plain values is one leaf."""
    items = items_of(batch)
    if items is None or not any(isinstance(item, Tensor) or items_of(item) is not None for item in items):
        yield batch
        return
    for item in items:
        yield from _leaves(item)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
