"""Samplers and loaders of libraries: lhotse's, whose items are objects, and timm's, whose workers stay."""

from typing import Any

import torch
from lhotse import CutSet
from lhotse.dataset import DynamicBucketingSampler, DynamicCutSampler
from lhotse.testing.dummies import dummy_cut
from libraries.rows import Fitted, Row, vectors
from timm.data.loader import MultiEpochsDataLoader
from torch.utils.data import DataLoader, Dataset


class Recordings(Dataset[Any]):
    """Makes a vector and a number of each cut in a batch."""

    def __getitem__(self, cuts: CutSet) -> Any:
        lengths = torch.tensor([[cut.duration] for cut in cuts])
        return lengths / torch.arange(1.0, 9.0), lengths.sin()


def by_duration(kind: Any = DynamicCutSampler, **options: Any) -> dict[str, Any]:
    cuts = CutSet.from_cuts(dummy_cut(index, duration=1.0 + index * 7 % 5) for index in range(16))
    sampler = kind(cuts, max_duration=10, shuffle=True, seed=2, **options)
    return {"train": DataLoader(Recordings(), sampler=sampler, batch_size=None)}


def staying() -> dict[str, Any]:
    """Return timm's loader, whose iterator and workers outlast an epoch."""
    data = vectors()["train"].dataset
    return {"train": MultiEpochsDataLoader(data, batch_size=4, num_workers=1, persistent_workers=True)}


ROWS = {
    "lhotse, batches by duration": Row(Fitted, by_duration),
    "lhotse, buckets": Row(Fitted, lambda: by_duration(DynamicBucketingSampler, num_buckets=2, buffer_size=12)),
    "timm, a loader that stays": Row(Fitted, staying),
}
