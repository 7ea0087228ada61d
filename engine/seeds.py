"""Seeds, which are hashes, and the main process's generators as a part of a run's state."""

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from xxhash import xxh3_64_intdigest

from midstride.engine.errors import NotExact, UserError

__all__ = [
    "DeviceGenerator",
    "Generators",
    "ensure_generators_free",
    "mix",
    "rank_seed",
    "reserved_generators",
    "seed_everything",
]

_MASK = (1 << 64) - 1


def mix(a: int, b: int) -> int:
    """Return a 64-bit hash of two integers.

    Neighbouring inputs give unrelated outputs, which matters because torch's CPU
    generator uses only the low 32 bits of a seed.

    Source:
        splitmix64, Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators".

    >>> mix(7, 0) != mix(7, 1)
    True
    """
    z = (a + (b + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def rank_seed(seed: int, rank: int) -> int:
    """Return the seed of one rank's main generators, for use after the module is built."""
    return mix(seed, rank)


def _count(gpus: int) -> str:
    return f"{gpus} GPU{'s' if gpus > 1 else ''}" if gpus else "no GPU"


class DeviceGenerator(Protocol):
    """Generator of a device beyond torch's own functions; its state is a number below 2 ** 64."""

    def get_state(self) -> int:
        """Return where it stands."""
        ...

    def set_state(self, state: int, /) -> None:
        """Let it stand there."""
        ...


def seed_everything(seed: int, device: DeviceGenerator | None = None) -> None:
    """Seed `random`, numpy and torch on all devices, and the generator of a further `device`.

    Call it before building a module by hand; `Trainer(seed=...)` does so too.

    Raises:
        UserError: another thread trains with the generators.
    """
    ensure_generators_free()
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)
    if device is not None:
        device.set_state(seed)


#: threads that train with the generators of this process
_RESERVED: list[threading.Thread] = []


@contextmanager
def reserved_generators() -> Iterator[None]:
    """Keep other threads from training or seeding while the block runs.

    Raises:
        UserError: another thread trains already.
    """
    ensure_generators_free()
    thread = threading.current_thread()
    _RESERVED.append(thread)
    try:
        yield
    finally:
        _RESERVED.remove(thread)


def ensure_generators_free() -> None:
    """Check that no other thread of this process trains.

    Raises:
        UserError: one does. Two trainings would draw from the same random numbers, and neither would be exact.
    """
    for thread in _RESERVED:
        if thread is not threading.current_thread() and thread.is_alive():  # in a fork, other threads are not
            raise UserError(
                f"the thread {thread.name} of this process trains, and both would draw from the same random numbers: "
                "neither would be exact. Train one after the other, or each in a process of its own, by train(job) of "
                "midstride.flows or Prefect's ProcessPoolTaskRunner"
            )


class Generators:
    """The main process's generators: torch on the CPU and on this rank's GPUs, numpy, `random`.

    A GPU's state goes by its position among those of the rank, not by its index: another attempt may have others.

    Args:
        device: a further one, if there is one.
        alike: whether all ranks draw the same numbers.
        devices: of this rank, in order; those that are no GPUs have no generator of their own.
    """

    def __init__(
        self, device: DeviceGenerator | None = None, *, alike: bool = False, devices: Sequence[torch.device] = ()
    ) -> None:
        self._device, self._alike = device, alike
        self._gpus = [*dict.fromkeys(device for device in devices if device.type == "cuda")]

    def state_dict(self) -> dict[str, Any]:
        """Return every generator's state."""
        return {
            "torch": torch.get_rng_state(),
            "cuda": [torch.cuda.get_rng_state(gpu) for gpu in self._gpus],
            "numpy": np.random.get_state(legacy=True),
            "random": random.getstate(),
            **({} if self._device is None else {"device": self._device.get_state()}),
        }

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore every generator; call it last, since other parts may draw numbers as they load.

        Raises:
            NotExact: the states are of other devices, or of another number of GPUs.
        """
        if (was := "device" in state_dict) != (self._device is not None):
            states, trains = ("the random numbers", "no such device") if was else ("no random numbers", "one")
            raise NotExact(
                f"the snapshot has {states} of an XLA device, and this rank trains on {trains}: its draws, such as "
                "dropout, could not continue. Resume with the strategy of the snapshot, or start another run with the "
                "weights of this one."
            )
        gpu_states = state_dict["cuda"]
        if len(gpu_states) != len(self._gpus):
            raise NotExact(
                f"the snapshot has the random numbers of {_count(len(gpu_states))}, and this rank trains on "
                f"{_count(len(self._gpus))}: draws on a GPU, such as dropout, could not continue. Resume on as many "
                "GPUs for each process, or start another run with the weights of this one."
            )
        torch.set_rng_state(state_dict["torch"])
        for gpu, state in zip(self._gpus, gpu_states, strict=True):
            torch.cuda.set_rng_state(state, gpu)
        np.random.set_state(state_dict["numpy"])
        random.setstate(state_dict["random"])
        if self._device is not None:
            self._device.set_state(state_dict["device"])

    def resharded(self, states: Sequence[dict[str, Any]], rank: int) -> dict[str, Any]:
        """Return the saved state of `rank`; for a new rank, a fresh one hashed from rank 0's."""
        if self._alike or rank < len(states):
            return states[0 if self._alike else rank]
        seed_everything(mix(xxh3_64_intdigest(states[0]["torch"].numpy().tobytes()), rank), self._device)
        return self.state_dict()
