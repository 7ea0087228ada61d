"""What ranks ought to have alike: compared to the last byte, and without one of them staying behind."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from midstride.engine.checkpointing.replica_check import ReplicaCheck


def check(own: Any, others: dict[str, str] | None = None) -> Any:
    """Compare the state `own` of rank 0 with what another rank says; return what rank 0 has said of its own."""
    said: list[Any] = []

    def gather(value: Any) -> list[Any]:
        said.append(value)
        return [value, value if others is None else others]

    world = SimpleNamespace(size=2, is_first=True)
    strategy: Any = SimpleNamespace(world=world, is_replicated=lambda path: True, name="ddp")
    ReplicaCheck(strategy, gather).check(own)
    return said[0]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(1 << 20),
        torch.zeros(1 << 10, 1 << 10).t(),
        torch.zeros(3, dtype=torch.complex64).conj(),
        torch.zeros(()),
    ],
    ids=["large", "transposed", "conjugated", "a number"],
)
def test_one_element_that_differs_is_named(tensor: torch.Tensor, caplog: pytest.LogCaptureFixture) -> None:
    before = check({"weight": tensor})
    assert caplog.text == ""
    tensor.view(-1)[-1:].add_(1) if tensor.is_contiguous() else tensor[-1, -2].add_(1)

    with caplog.at_level(logging.WARNING):
        check({"weight": tensor}, before)

    assert "changed them on one rank only: weight." in caplog.text


def test_a_rank_with_unwritable_state_lets_the_writer_report_it() -> None:
    assert check({"weight": torch.ones(1), "function": check}) == {}
