"""Digests of samples are kept in snapshots: how they are computed may change, their values may not."""

import marshal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from midstride.engine.data.iterable.content_digest import content_digest, stack_of


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


#: batches whose tensors are digested one by one: they are few, or not alike
APART = ("few", "of other shapes", "of other types")


@pytest.mark.parametrize("batch", BATCHES)
def test_a_list_of_tensors_has_the_digest_of_their_stack(batch: str) -> None:
    samples = BATCHES[batch]()
    apart = batch in APART
    plain: Any = [by_itself(sample) for sample in samples] if apart else ("stack", *by_itself(torch.stack(samples)))
    assert content_digest(samples) == xxh3_64_intdigest(marshal.dumps(plain, 0))
    assert content_digest(samples, stack_of(samples)) == content_digest(samples)


@pytest.mark.parametrize("batch", BATCHES)
def test_samples_of_several_parts_have_the_digest_of_columns(batch: str) -> None:
    tensors = BATCHES[batch]()
    of_tuples = content_digest([(tensor, number) for number, tensor in enumerate(tensors)])
    assert of_tuples == content_digest([(tensor.clone(), number) for number, tensor in enumerate(tensors)])
    of_dicts = content_digest([{"x": tensor, "y": number} for number, tensor in enumerate(tensors)])
    turned = content_digest([(tensor, number) for number, tensor in enumerate(reversed(tensors))])
    counted = content_digest([(tensor, number + 1) for number, tensor in enumerate(tensors)])
    fewer = content_digest([(tensor, number) for number, tensor in enumerate(tensors[1:])])
    assert len({of_tuples, of_dicts, counted, fewer}) == 4
    assert (turned == of_tuples) == (batch == "empty")


def test_nothing_that_samples_differ_in_is_left_out() -> None:
    x, rows = torch.arange(6.0), torch.arange(12.0).reshape(4, 3)
    other = [
        *([x[:3], x[3:], x[:3], x[3:]], [x[:3], x[3:], x[3:], x[:3]], [x[:2], x[2:4], x[4:], x[:2], x[2:4], x[4:]]),
        *(list(rows), list(rows.reshape(6, 2)), list(rows.view(torch.int32)), list(rows.double())),
        *(rows, [rows], tuple(rows[:2]), [x.to_sparse()] * 4),
        *([{"a": 1}] * 4, [{"b": 1}] * 4, [{"a": 1}] * 5, [{"a": True}] * 4, [{"a": 1.0}] * 4, [[1]] * 4),
        *([{"a": x}] * 4, [{"b": x}] * 4, [{"a": x}] * 3 + [{"b": x}], [{"a": x}] * 5, [(x,)] * 4, [(x, x)] * 4),
        *([torch.nested.nested_tensor([x[:n], x[n:]], layout=torch.jagged)] for n in (2, 3)),
        *([(x, x)] * 3 + [(x, x[:2])], [(x, x)] * 3 + [(x,)], [(x, (x, 1))] * 4, [(x, (x, 2))] * 4),
    ]
    assert len({content_digest(samples) for samples in other}) == len(other)
