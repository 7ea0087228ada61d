"""A machine with GPUs, faked: tensors on "cuda:0" and "cuda:1" without data, and a generator for each."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

#: makes a machine with so many GPUs, in the index of the one before
Machine = Callable[[int], None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Random states of GPUs: as many as there are, each known by its index, as torch.cuda has them."""
    states: list[Tensor] = []

    def index_of(device: torch.device | str | int) -> int:
        index = device if isinstance(device, int) else torch.device(device).index or 0
        if index >= len(states):
            raise RuntimeError(f"CUDA error: invalid device ordinal {index} of {len(states)}")
        return index

    def read(device: torch.device | str | int = 0) -> Tensor:
        return states[index_of(device)].clone()

    def write(state: Tensor, device: torch.device | str | int = 0) -> None:
        states[index_of(device)] = state.clone()

    def of(gpus: int) -> None:
        states[:] = [torch.tensor([number], dtype=torch.uint8) for number in range(gpus)]

    monkeypatch.setattr(torch.cuda, "get_rng_state", read)
    monkeypatch.setattr(torch.cuda, "set_rng_state", write)
    return of


@pytest.fixture
def fake() -> Iterator[FakeTensorMode]:
    """Tensors that have a shape and a device, and no data: an operation on two devices raises as it does on GPUs."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():  # backward passes ask for CUDA itself
        yield mode
