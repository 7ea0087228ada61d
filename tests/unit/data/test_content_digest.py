"""Digests of samples are kept in snapshots: how they are computed may change, what they are may not."""

import marshal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from midstride.engine.data.iterable.content_digest import content_digest


def by_itself(sample: Tensor) -> tuple[str, tuple[int, ...], int]:
    """What a digest takes of one tensor, by the words of its type, its shape and its bytes."""
    words = sample.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return str(sample.dtype), tuple(sample.shape), xxh3_64_intdigest(words.tobytes())


BATCHES: dict[str, Callable[[], list[Tensor]]] = {
    "rows": lambda: [torch.randn(8) for _ in range(6)],
    "numbers": lambda: [torch.tensor(float(n)) for n in range(6)],
    "of integers": lambda: [torch.arange(n, n + 5) for n in range(6)],
    "of truths": lambda: [torch.randn(8) > 0 for _ in range(6)],
    "of complex numbers": lambda: [torch.randn(8, dtype=torch.complex64) for _ in range(6)],
    "of halves": lambda: [torch.randn(8).bfloat16() for _ in range(6)],
    "turned": lambda: [torch.randn(3, 5).T for _ in range(6)],
    "channels last": lambda: [torch.randn(4, 5, 3).permute(2, 0, 1) for _ in range(6)],
    "with a gradient": lambda: [torch.randn(8, requires_grad=True) for _ in range(6)],
    "few": lambda: [torch.randn(8) for _ in range(2)],
    "large": lambda: [torch.randn(5000) for _ in range(4)],
    "empty": lambda: [torch.empty(0) for _ in range(6)],
    "of other shapes": lambda: [torch.randn(n) for n in range(1, 7)],
    "of other types": lambda: [torch.ones(3, dtype=kind) for kind in (torch.float32, torch.int32) * 3],
}


@pytest.mark.parametrize("batch", BATCHES)
def test_a_list_of_tensors_has_the_digest_of_each_by_itself(batch: str) -> None:
    samples = BATCHES[batch]()
    plain: list[Any] = [by_itself(sample) for sample in samples]
    assert content_digest(samples) == xxh3_64_intdigest(marshal.dumps(plain, 0))
