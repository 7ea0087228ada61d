"""Restore check: finds, at the start of an attempt, state that the next cannot restore.

Before the first step and once after it, every part that depends on user code loads the state that it returned, and has
to return the same state again. Parts that cannot load a state while they are in use are checked on a clone. Tensors are
passed without a copy, so that they keep their memory. The states are compared by a copy, large tensors by a digest.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from midstride.engine.errors import EngineError, NotExact, UnsupportedState, UserCodeError
from midstride.engine.objects.kinds.tensors import tensors_in
from midstride.engine.processes.preload import collector_paused
from midstride.engine.state.differences import Digested, Placed, StandIn, differences
from midstride.engine.state.object_nodes import Instance, Same, View
from midstride.engine.state.stateful import Stateful
from midstride.engine.state.tensors import is_freed
from midstride.engine.user_code import is_retryable

__all__ = ["check_restores", "copied_with_digests", "differs", "with_places", "with_same_tensors"]

#: bytes from which on tensors are compared by a digest, which takes a fifth of the time of a copy and a comparison
_LARGE_BYTES = 1 << 16
#: types of values that are never changed in place
_ATOMS = frozenset({int, float, complex, bool, str, bytes, type(None), Same, View})
#: part that depends on user code -> its name in errors, in the order of the restore
CHECKED_PARTS = {
    "strategy": "the strategy",
    "feeds": "the loaders",
    "structure": "the module's structure",
    "module": "the module",
    "optimizers": "the optimizers",
    "schedulers": "the schedulers",
    "callbacks": "the callbacks",
    "metrics": "the metrics",
    "buffers": "the module's buffers",
    "user": "what on_save_checkpoint keeps",
    "objects": "the attributes",
}


@collector_paused()  # it would pass over the copies of all tensors several times
def check_restores(
    parts: Mapping[str, Stateful], when: str, reading: Callable[[], AbstractContextManager[None]] = nullcontext
) -> None:
    """Load each part's own state into it, and check that its state is the same afterwards.

    Generators are restored. A part whose `is_library_code` is true is not checked: no user code saves or loads it.

    Args:
        parts: parts of a run; those in `CHECKED_PARTS` are checked.
        when: time of the check, for the message.
        reading: entered while states are read.

    Raises:
        NotExact: a part did not restore its state.
    """
    with reading():
        drawn = parts["generators"].state_dict()
        objects = parts["objects"].state_dict()
        objects_before = _copied(objects)
    for name in [name for name in CHECKED_PARTS if name in parts]:
        if getattr(parts[name], "is_library_code", False):
            continue
        with reading():
            given = objects if name == "objects" else parts[name].state_dict()
        before = objects_before if name == "objects" else _copied(given)
        part = _trial_part(parts[name])
        try:
            part.load_state_dict(with_same_tensors(given))
        except Exception as error:
            if isinstance(error, EngineError) or is_retryable(error):
                raise
            message = _restore_message(CHECKED_PARTS[name], when, f"{type(error).__name__}: {error}")
            raise NotExact(f"{UserCodeError.of('load_state_dict', error)}\n{message}") from error
        with reading():
            now = part.state_dict()
        if paths := differs(before, now):
            raise NotExact(_restore_message(CHECKED_PARTS[name], when, ", ".join(paths[:5])))
    parts["generators"].load_state_dict(drawn)


def _trial_part(part: Stateful) -> Stateful:
    """Return a clone of `part` if it has a method `clone`, else itself."""
    clone: Callable[[], Stateful] | None = getattr(part, "clone", None)
    return part if clone is None else clone()


def _restore_message(name: str, when: str, what: str) -> str:
    return (
        f"{name}, {when}, did not load the state that it saved: {what}. No later attempt could resume from a snapshot. "
        "Its state_dict must return everything that load_state_dict needs, bit for bit; or run without snapshots "
        "(snapshots=None)."
    )


def _on_host(tensor: Tensor) -> Tensor | Digested:
    """Return a copy of `tensor` on the CPU; for large tensors, their digest."""
    if is_freed(tensor):
        raise UnsupportedState(
            f"a weight of {list(tensor.shape)} that a step has gathered and the strategy has freed since is held by an "
            "attribute or a state: no snapshot can hold it. Keep a clone of it instead"
        )
    if _has_digest(tensor):
        return Digested.of(tensor)
    copied = tensor.clone() if tensor.is_cpu else tensor.detach().cpu()
    return nn.Parameter(copied, tensor.requires_grad) if type(tensor) is nn.Parameter else copied


def _has_digest(tensor: Tensor) -> bool:
    """Return whether `tensor` is a large one, on the CPU or a GPU."""
    is_plain = tensor.device.type in ("cpu", "cuda") and tensor.layout == torch.strided and not tensor.is_quantized
    return is_plain and type(tensor) in (Tensor, nn.Parameter) and tensor.nbytes >= _LARGE_BYTES


def copied_with_digests(tree: Any) -> Any:
    """Return a copy of `tree` on the host, with the digests of large tensors in their place."""
    return _copied(tree)


def with_same_tensors(tree: Any, seen: list[Tensor] | None = None) -> Any:
    """Return a copy of `tree` with its very tensors; `seen` gets each of them once."""

    def same(tensor: Tensor) -> Tensor:
        if seen is not None:
            seen.append(tensor)
        return tensor

    return _copied(tree, same)


def with_places(tree: Any) -> Any:
    """Return a copy of `tree` with the places of tensors in memory in place of the tensors."""
    return _copied(tree, Placed)


def differs(before: Any, now: Any) -> list[str]:
    """Return the differences of `now` from a copy by one of these functions, as texts."""
    with torch.no_grad():
        return differences(before, now)


def _copied(tree: Any, tensor: Callable[[Tensor], Tensor | StandIn] = _on_host) -> Any:
    """Return a copy of `tree` whose tensors are replaced by the results of `tensor`."""
    with torch.no_grad():  # to detach thousands of tensors first takes longer than to clone them
        return _Copier(tensor).copy(tree)


class _Copier:
    """Copies trees of state: a fifth of the time of `copy.deepcopy`.

    Args:
        tensor: returns the replacement of a tensor; called once for each.
    """

    def __init__(self, tensor: Callable[[Tensor], Tensor | StandIn]) -> None:
        self._tensor, self._known = tensor, dict[int, Any]()

    def copy(self, value: Any) -> Any:
        """Return a copy of `value`; an object that is there twice has one copy."""
        kind = type(value)
        if kind in _ATOMS:
            return value
        if (number := id(value)) not in self._known:
            self._known[number] = _COPIES.get(kind, _Copier._other)(self, value)
        return self._known[number]

    def _dict(self, value: dict[Any, Any]) -> Any:
        return {key: self.copy(item) for key, item in value.items()}

    def _ordered(self, value: "OrderedDict[Any, Any]") -> Any:
        copied = OrderedDict(self._dict(value))
        vars(copied).update(self._dict(vars(value)))  # of a module's state, the versions of its layers
        return copied

    def _instance(self, value: Instance) -> Any:
        return Instance(value.form, value.kind, self._dict(value.state))

    def _list(self, value: list[Any]) -> Any:
        return value[:] if _ATOMS.issuperset(map(type, value)) else [*map(self.copy, value)]

    def _tuple(self, value: tuple[Any, ...]) -> Any:
        return value if _ATOMS.issuperset(map(type, value)) else (*map(self.copy, value),)

    def _other(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value)
        return copy.deepcopy(value, {id(one): self.copy(one) for one in tensors_in(value)})


_COPIES: dict[type, Callable[[_Copier, Any], Any]] = {
    dict: _Copier._dict,
    OrderedDict: _Copier._ordered,
    Instance: _Copier._instance,
    list: _Copier._list,
    tuple: _Copier._tuple,
}
