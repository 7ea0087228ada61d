"""A part that does not take back what it gave is named, however large it is."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from midstride.engine.errors import NotExact
from midstride.engine.training.checkpointing.restore_check import CHECKED_PARTS, check_restores

LARGE = 1 << 20
TENSORS: dict[str, Callable[[], Tensor]] = {
    "small": lambda: torch.ones(3),
    "large": lambda: torch.ones(LARGE),
    "large, 16 bits": lambda: torch.ones(LARGE, dtype=torch.bfloat16),
    "large, turned": lambda: torch.ones(1024, LARGE // 512).t(),
    "large, every other": lambda: torch.ones(2 * LARGE)[::2],
}


class Part:
    """Gives its state, and takes a state by `take`."""

    def __init__(self, state: dict[str, Any], take: Callable[[Tensor], Tensor] = lambda given: given) -> None:
        self.state, self.take = state, take

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self.state = {name: self.take(value) for name, value in state_dict.items()}


def parts_with(part: Part) -> dict[str, Any]:
    return {name: Part({}) for name in ("generators", *CHECKED_PARTS)} | {"module": part}


def with_another_end(given: Tensor) -> Tensor:
    changed = given.clone()
    changed[-1] *= 2
    return changed


@pytest.mark.parametrize("kind", TENSORS)
def test_a_tensor_that_comes_back_otherwise_is_named(kind: str) -> None:
    check_restores(parts_with(Part({"weights": TENSORS[kind]()})), "before the first step")
    # In another memory, and in another order of it, the values are the same.
    check_restores(parts_with(Part({"weights": TENSORS[kind]()}, lambda given: given.clone().contiguous())), "before")
    with pytest.raises(NotExact, match=r"the module, before the first step, did not take back .*weights"):
        check_restores(parts_with(Part({"weights": TENSORS[kind]()}, with_another_end)), "before the first step")
