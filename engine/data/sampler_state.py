"""What a sampler carries from one epoch to the next: its counters, its generators, or what it says itself."""

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor

from midstride.engine.data.held import get_state, held_generators, set_state
from midstride.engine.errors import UnsupportedState
from midstride.engine.snapshots.codec import differences, walk

__all__ = ["SamplerState"]

_LONG = 10_000
State = dict[str, Any]


class SamplerState:
    """The state of a sampler, and of those it wraps, as it differs from when it was built.

    A sampler is built anew in every life, so what never changes (weights, indices) is in no snapshot.

    Args:
        sampler: any sampler or batch sampler.
        dataset: what it samples from; not part of its state.
    """

    def __init__(self, sampler: Any, dataset: object) -> None:
        self._samplers = dict(_nested(sampler))
        self._generators = held_generators(sampler, beside=dataset)
        self._dataset = dataset
        self._built = self._whole()

    @property
    def samplers(self) -> list[Any]:
        """The sampler and those it wraps."""
        return list(self._samplers.values())

    def taken(self) -> State:
        """Return what differs from when the sampler was built, copied."""
        built = self._built
        return {path: v for path, v in self._whole().items() if path not in built or _differ(built[path], v)}

    def put(self, state: State) -> None:
        """Put the sampler where it was when `taken` returned `state`."""
        wanted = copy.deepcopy({**self._built, **state})
        for path in self._whole().keys() - wanted.keys():
            owner, _, name = path.partition("/")
            delattr(self._samplers[owner], name)
        for path, value in wanted.items():
            owner, _, name = path.partition("/")
            if owner == "generators":
                set_state(self._generators[name], value)
            elif name == "":
                self._samplers[owner].load_state_dict(value)
            else:
                setattr(self._samplers[owner], name, value)

    def _whole(self) -> State:
        state: State = {}
        for path, sampler in self._samplers.items():
            if _says_itself(sampler):
                state[f"{path}/"] = copy.deepcopy(sampler.state_dict())
                continue
            for name, value in getattr(sampler, "__dict__", {}).items():
                if value is not self._dataset and _is_plain(value):
                    state[f"{path}/{name}"] = _copied(value)
        return state | {f"generators/{name}": get_state(g) for name, g in self._generators.items()}


def _nested(sampler: Any) -> Iterator[tuple[str, Any]]:
    path, seen = "sampler", set[int]()
    while sampler is not None and id(sampler) not in seen:
        seen.add(id(sampler))
        yield path, sampler
        inner = [getattr(sampler, name, None) for name in ("sampler", "batch_sampler")]
        sampler = next((value for value in inner if hasattr(value, "__iter__") and hasattr(value, "__dict__")), None)
        path += ".sampler"


def _says_itself(sampler: Any) -> bool:
    return callable(getattr(sampler, "state_dict", None)) and callable(getattr(sampler, "load_state_dict", None))


def _is_plain(value: Any) -> bool:
    """Return whether `value` is of a kind that a snapshot holds; of long lists the first items speak for all."""
    if value is None or isinstance(value, (bool, int, float, str, Tensor, np.ndarray)):
        return True
    try:
        walk(value[:_LONG] if isinstance(value, (list, tuple)) else value)
    except UnsupportedState:
        return False
    return True


def _differ(a: Any, b: Any) -> bool:
    if isinstance(a, (list, tuple)) and len(a) > _LONG:
        return bool(a != b)  # a thousand times as fast
    return bool(differences(a, b))


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, (list, tuple)) and len(value) > _LONG:
        return copy.copy(value)
    return copy.deepcopy(value)
