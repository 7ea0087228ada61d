"""The random numbers of a rank's GPUs come back by their order, whatever indices the next life has."""

from typing import Any

import pytest
import torch
from gpu.conftest import Machine

from midstride.engine.errors import NotExact
from midstride.engine.seeds import Generators


def generators(*indices: int) -> Generators:
    devices = [torch.device("cuda", index) for index in indices] or [torch.device("cpu")]
    return Generators(devices=devices)


#: GPUs there were, those of the rank, GPUs there are, those of the rank now
LIVES = {
    "the same": (2, [1], 2, [1]),
    "another index": (2, [1], 2, [0]),
    "fewer are visible": (4, [3], 1, [0]),
    "more are visible": (1, [0], 4, [2]),
    "two, in another order": (4, [0, 3], 4, [2, 1]),
    "on the CPU": (2, [], 0, []),
}


@pytest.mark.parametrize("case", LIVES)
def test_gpus_go_on_from_the_states_of_those_before_in_order(case: str, machine: Machine) -> None:
    before, mine, after, mine_now = LIVES[case]
    machine(before)
    given = generators(*mine).state_dict()
    assert [int(state) for state in given["cuda"]] == mine
    machine(after)
    generators(*mine_now).load_state_dict(given)
    assert [int(torch.cuda.get_rng_state(index)) for index in mine_now] == mine


def test_a_device_named_twice_has_one_state(machine: Machine) -> None:
    machine(2)
    assert len(generators(1, 1, 0).state_dict()["cuda"]) == 2


#: states in the snapshot, GPUs of the rank now, words
REFUSED = {
    "from a GPU to the CPU": (1, [], "of 1 GPU, and this rank trains on no GPU"),
    "from the CPU to a GPU": (0, [0], "of no GPU, and this rank trains on 1 GPU"),
    "on more GPUs": (1, [0, 1], "of 1 GPU, and this rank trains on 2 GPUs"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unrestorable_generators_are_refused_before_a_restore(case: str, machine: Machine) -> None:
    states, mine, words = REFUSED[case]
    machine(2)
    now = torch.get_rng_state()
    given = {**generators(*range(states)).state_dict(), "torch": torch.zeros_like(now)}
    with pytest.raises(NotExact, match=words):
        generators(*mine).load_state_dict(given)
    assert torch.equal(torch.get_rng_state(), now)


class Further:
    """The generator of a device that torch's own functions do not reach."""

    def get_state(self) -> int:
        return 3

    def set_state(self, state: int) -> None: ...


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [(Further(), None, "trains on no such device"), (None, Further(), "no random numbers of an XLA device")],
)
def test_random_numbers_of_another_kind_of_device_are_refused(before: Any, now: Any, words: str) -> None:
    with pytest.raises(NotExact, match=words):
        Generators(now).load_state_dict(Generators(before).state_dict())
