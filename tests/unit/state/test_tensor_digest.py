"""Digests of tensors: other content, another digest, whatever the layout."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from midstride.engine.objects.digest import digest_lines
from midstride.engine.state.tensor_digest import tensor_digest


def _nested(values: Tensor, layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([values[0], values[1, :1]], layout=layout)


#: how a matrix of two rows becomes a tensor
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "strided": Tensor.clone,
    "empty": lambda values: values[:0],
    "transposed": lambda values: values.t(),
    "with a gradient": lambda values: values.clone().requires_grad_(),
    "a parameter": nn.Parameter,
    "bfloat16": Tensor.bfloat16,
    "conjugate": lambda values: torch.complex(values, values).conj(),
    "sparse": Tensor.to_sparse,
    "csr": Tensor.to_sparse_csr,
    "csc": Tensor.to_sparse_csc,
    "bsr": lambda values: values.to_sparse_bsr((1, 1)),
    "nested": lambda values: _nested(values, torch.strided),
    "jagged": lambda values: _nested(values, torch.jagged),
    "meta": lambda values: values.to("meta"),
    "mkldnn": lambda values: values.to_mkldnn(),
}
#: of which nothing but the shape can be told
UNREADABLE = ("empty", "meta", "mkldnn")


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", KINDS)
def test_a_digest_tells_the_content_of_a_tensor_of_any_layout(kind: str) -> None:
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    tensors = [KINDS[kind](values), KINDS[kind](values.clone()), KINDS[kind](values * 2)]
    same, again, other = map(tensor_digest, tensors)
    assert same == again
    assert (same == other) is (kind in UNREADABLE)

    lines = [digest_lines("tensor", tensor) for tensor in tensors]  # as a user's global is looked at
    assert lines[0] == lines[1]
    assert (lines[0] == lines[2]) is (kind in UNREADABLE)


def test_a_digest_samples_large_tensors_only() -> None:
    values = torch.zeros(1000)
    before = tensor_digest(values), tensor_digest(values, 400)
    values[1] = 1
    assert tensor_digest(values) != before[0]
    assert tensor_digest(values, 400) == before[1]
    values[0] = 1
    assert tensor_digest(values, 400) != before[1]


def test_a_change_anywhere_in_a_large_array_is_seen() -> None:
    values = torch.zeros((1 << 26) + 8, dtype=torch.uint8)
    looks = []
    for _ in range(2):
        looks.append([digest_lines("values", one) for one in (values, values.numpy())])
        values[-2] = 1
    assert all(before != after for before, after in zip(*looks, strict=True))


@pytest.mark.parametrize("items", [[[n] for n in range(5000)], [torch.zeros(1) for _ in range(5000)]])
def test_a_change_anywhere_in_a_long_list_is_seen(items: list[list[int] | Tensor]) -> None:
    before = digest_lines("list", items)
    items[1][0] = 7
    assert digest_lines("list", items) != before
