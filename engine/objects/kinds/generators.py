"""Random number generators of torch, numpy and Python: their states and seeding."""

import random
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from midstride.engine.code_origin import is_user_class
from midstride.engine.errors import NotExact
from midstride.engine.objects.attributes import state_attributes
from midstride.engine.objects.classes import class_called
from midstride.engine.objects.kinds.kind import MISSING, Kind
from midstride.engine.state.object_nodes import Instance, kind_name, step

if TYPE_CHECKING:
    from midstride.engine.objects.restore import GraphRestore
    from midstride.engine.objects.walk import GraphWalk

__all__ = ["MAIN_GENERATORS", "Generator", "Generators", "get_state", "is_generator", "seeder", "set_state"]

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
#: default generators of libraries: each is part of every snapshot
MAIN_GENERATORS = (torch.default_generator, np.random.mtrand._rand, random._inst)
_MADE: dict[str, type] = {
    kind_name(kind): kind for kind in (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)
}
#: numpy's bit generators by name
_BITS: dict[str, Callable[[], Any]] = {
    kind.__name__: kind
    for kind in (np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64)
}


def is_generator(value: object) -> bool:
    """Return whether `value` is a random number generator; a cached `isinstance`."""
    kind: type = type(value)
    return _is_generator_class(kind)


@lru_cache(maxsize=1024)  # asked of each global at every snapshot; torch's class answers `isinstance` in Python
def _is_generator_class(kind: type) -> bool:
    return issubclass(kind, Generator)


class Generators(Kind):
    """Random number generators."""

    form = "generator"

    def matches(self, kind: type) -> bool:
        """Return whether `kind` is a class of generators that have a state."""
        return issubclass(kind, Generator) and not issubclass(kind, random.SystemRandom)

    def describe(self, walk: "GraphWalk", value: Any, path: str) -> Any:
        """Return the state; of one of numpy's, also from what it spawns others."""
        walk.meet(value, path)
        node = self.instance(value, state=get_state(value))
        bits: Any = getattr(value, "bit_generator", None)
        seeds: Any = getattr(bits, "seed_seq", None)
        if id(bits) in walk.seen:
            node.state["bits"] = walk.node(bits, path)
        elif bits is not None:
            walk.meet(bits, step(path, "bit_generator"))
        if isinstance(seeds, np.random.SeedSequence):
            node.state["spawned"] = seeds.n_children_spawned
            node.state["seeds"] = {
                "entropy": seeds.entropy,
                "spawn_key": list(seeds.spawn_key),
                "pool_size": seeds.pool_size,
            }
        if is_user_class(type(value)):
            node.state["attributes"] = walk.attributes(state_attributes(value), path)
        return node

    def restore(self, restore: "GraphRestore", node: Instance, live: Any, path: str) -> Any:
        """Set the state of the live generator, or of a new one."""
        state = node.state["state"]
        fits = isinstance(live, Generator) and node.kind == kind_name(type(live))
        if not restore.claim(live, path, fits=fits and _source_of(get_state(live)) == _source_of(state)):
            kind = _MADE.get(node.kind) or class_called(node.kind, live, object)
            base = next((base for base in _MADE.values() if kind is not None and issubclass(kind, base)), None)
            if base is None:
                return restore.mark_stale(path, node.kind, live)
            live = restore.record(_new_generator(kind, base, state, restore.device, path), path)
        live = self._with_bits(restore, node, live, path)
        set_state(live, state)
        if "seeds" in node.state:
            owner: Any = live  # one of numpy's
            bits = owner.bit_generator
            seeds = np.random.SeedSequence(**node.state["seeds"], n_children_spawned=node.state["spawned"])
            bits.__setstate__((bits.state, seeds))
        if "attributes" in node.state:
            restore.attributes(node.state["attributes"], live, path)
        return live

    def _with_bits(self, restore: "GraphRestore", node: Instance, live: Any, path: str) -> Any:
        """Return a generator that draws from the bits that another attribute holds, too."""
        if "bits" in node.state:
            bits = restore.value(node.state["bits"], MISSING, path)
            if isinstance(bits, np.random.BitGenerator) and bits is not live.bit_generator:
                return restore.record(np.random.Generator(bits), path)
        elif hasattr(live, "bit_generator"):
            restore.record(live.bit_generator, step(path, "bit_generator"))
        return live


def _source_of(state: Any) -> Any:
    """Return a generator's source: numpy's bit generator by name, or the size of its state."""
    if isinstance(state, Tensor):
        return state.numel()
    return state["bit_generator"] if isinstance(state, dict) else None


def _new_generator(kind: Any, base: Any, state: Any, device: torch.device, path: str) -> Any:
    """Return a new generator of a class, with the bit generator or device that `state` fits.

    Raises:
        NotExact: the state is that of a GPU's generator, and this rank has no GPU.
    """
    source = _source_of(state)
    if isinstance(state, Tensor) and source != _source_of(torch.default_generator.get_state()):
        if device.type == "cpu":
            raise NotExact(
                f"{path} draws from a generator of a GPU in the snapshot, and this rank trains on the CPU: its random "
                "numbers could not continue. Resume on a GPU, or start another run with the weights of this one."
            )
        return torch.Generator(device)
    given = [_BITS[source]()] if isinstance(source, str) else []
    made = base.__new__(kind, *given)
    base.__init__(made, *given)  # not that of a derived class, whose arguments are unknown
    return made


def seeder(generator: Any) -> Callable[[int], object]:
    """Return a function that seeds `generator` by a 64-bit number."""
    if isinstance(generator, torch.Generator):
        return generator.manual_seed
    if isinstance(generator, np.random.RandomState):
        return lambda seed: generator.seed(seed >> 32)
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return lambda seed: setattr(bits, "state", type(bits)(seed).state)
    if isinstance(generator, random.Random):
        return generator.seed
    reseed: Callable[[int], Any] = generator.reseed
    return reseed


def get_state(generator: Any) -> Any:
    """Return the state of `generator`, in types that snapshots hold."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.getstate()


def set_state(generator: Any, state: Any) -> None:
    """Restore the state of `generator`."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.setstate(state)
