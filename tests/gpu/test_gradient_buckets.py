"""Buckets of gradients on a GPU are sent in one order on every rank, whenever the sums before them arrive."""

import pytest
import torch
from torch import Tensor, nn

from midstride.engine.strategies.gradient_buckets import GradientBuckets


class Busy:
    """A sum that arrives when it is waited for."""

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        """It is there."""


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(("device", "early"), [("cpu", 1), ("cuda:0", 3)])
def test_over_nccl_buckets_depend_on_the_backward_pass_alone(device: str, early: int) -> None:
    """NCCL stands still where two ranks begin its collectives in two orders, as those of `sync_batchnorm`."""
    sent: list[str] = []

    def start(flat: Tensor, name: str) -> Busy:
        sent.append(name)
        return Busy()

    parameters = [nn.Parameter(torch.empty(4, device=device)) for _ in range(3)]
    buckets = GradientBuckets(start, 2, lambda has: [False] * len(has), bucket_bytes=16)  # no copies of fake tensors
    for _ in range(2):  # the first only learns
        with buckets.backward(parameters):
            for parameter in reversed(parameters):
                parameter.grad = torch.empty(4, device=device)
                buckets.note(parameter)
        buckets.average(parameters)
    assert len(sent) == early
