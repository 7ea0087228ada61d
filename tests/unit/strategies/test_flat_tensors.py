"""Tensors that travel as one arrive as they would by themselves."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from midstride.engine.strategies.dp import _Broadcast
from midstride.engine.strategies.flat_tensors import bucket_indices, copy_together

CPU = torch.device("cpu")

#: what a module has
TENSORS: dict[str, Callable[[], list[Tensor]]] = {
    "several shapes": lambda: [torch.randn(3, 5), torch.randn(7), torch.randn(())],
    "several types": lambda: [torch.randn(3), torch.tensor(4), torch.randn(2).bfloat16(), torch.tensor([True])],
    "an order in memory": lambda: [
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(6, 4).t(),
    ],
    "gaps": lambda: [torch.randn(6, 4)[:, ::2], torch.randn(1).expand(3)],
    "nothing in one": lambda: [torch.randn(0, 3), torch.randn(2)],
    "sparse": lambda: [torch.randn(2), torch.eye(3).to_sparse(), torch.randn(4)],
    "none": list,
}


@pytest.mark.parametrize("case", TENSORS)
def test_copies_are_equal_and_their_own(case: str) -> None:
    tensors = TENSORS[case]()
    copies = copy_together(tensors, CPU)
    for tensor, copy in zip(tensors, copies, strict=True):
        assert (copy.dtype, copy.layout) == (tensor.dtype, tensor.layout)
        assert copy.to_dense().equal(tensor.to_dense())
        assert copy.layout != torch.strided or copy.stride() == torch.empty_like(tensor).stride()
    for number, copy in enumerate(copies):
        others = [*tensors, *copies[:number], *copies[number + 1 :]]
        before = [(other._version, other.to_dense().clone()) for other in others]
        copy.zero_()
        for other, (version, numbers) in zip(others, before, strict=True):
            assert other._version == version
            assert other.to_dense().equal(numbers)


def test_what_exceeds_a_bucket_travels_in_several() -> None:
    tensors = [torch.zeros(4), torch.zeros(2, dtype=torch.int64), torch.zeros(4), torch.zeros(4), torch.zeros(40)]
    assert bucket_indices(tensors, 32) == [[0, 2], [1], [3], [4]]


def test_gradients_of_replicas_are_added_in_their_order() -> None:
    weight, frozen = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3), requires_grad=False)
    broadcast: Callable[..., tuple[Tensor, ...]] = _Broadcast.apply
    copies = broadcast([CPU] * 3, weight, frozen)
    assert [copy.requires_grad for copy in copies] == [True, False] * 3
    terms = [torch.tensor([1e8, 1.0, 1e-8]), torch.tensor([-1e8, 1e-8, 1.0]), torch.tensor([1.0, 1e-8, 3e-8])]
    sum((copy * term).sum() for copy, term in zip(copies[::2], terms, strict=True)).backward()  # type: ignore[union-attr]
    assert weight.grad is not None
    assert weight.grad.equal((terms[0] + terms[1]) + terms[2])
