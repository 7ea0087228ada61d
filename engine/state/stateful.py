"""The state of a run: parts with `state_dict` and `load_state_dict`.

Law: after `b.load_state_dict(a.state_dict())`, `b` continues exactly as `a` would, bit for
bit. `tests/laws/` tests every part for it, and every resume checks it: the state of each
loaded part is read again and compared with the saved one.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

from midstride.engine.errors import EngineError, IdentityChanged, ReadBackDiffers
from midstride.engine.formatting import format_names
from midstride.engine.state.differences import differences
from midstride.engine.user_code import is_retryable

__all__ = ["AlikeOnRanks", "Reshardable", "Stateful", "restore_parts", "state_of"]

log = logging.getLogger(__name__)


@runtime_checkable
class Stateful(Protocol):
    """An object whose state can be saved and restored."""

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state of this part."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Restore the state that `state_dict` returned."""
        ...


@runtime_checkable
class Reshardable(Protocol):
    """A part whose state may differ between ranks."""

    def resharded(self, states: Sequence[Any], rank: int) -> Any:
        """Return the state of `rank` in a new world, given that of every rank of the old one."""
        ...


class AlikeOnRanks:
    """A part whose state is the same on every rank, unless user code has made it differ."""

    description: ClassVar[str]  #: what the part holds, for a warning

    def resharded(self, states: Sequence[dict[str, Any]], rank: int) -> dict[str, Any]:
        """Return the state of rank 0; warn if that of another rank differs."""
        for other, state in enumerate(states):
            if paths := differences(states[0], state):
                log.warning(
                    "%s differs between the ranks of the snapshot (rank 0 and rank %d: %s); the number of "
                    "ranks has changed, and every rank continues with rank 0's",
                    self.description,
                    other,
                    ", ".join(paths[:3]),
                )
                break
        return dict(states[0])


def state_of(parts: Mapping[str, Stateful]) -> dict[str, Any]:
    """Return the tree of a run's state, one branch per part."""
    return {name: part.state_dict() for name, part in parts.items()}


def restore_parts(parts: Mapping[str, Stateful], saved: Mapping[str, Any]) -> None:
    """Load every part in the given order, then compare its state with the saved one.

    The part "user" calls `on_load_checkpoint`, which may set attributes, and these are in the part "objects". So
    "objects" is compared before that call, and a warning names the attributes that it changes.

    Raises:
        ReadBackDiffers: a part is missing on one side, or differs from the saved one (torch casts
            optimizer state silently, for one).
    """
    if set(parts) != set(saved):
        raise ReadBackDiffers(
            f"the snapshot holds the parts {sorted(saved)}, this run has {sorted(parts)}: another version took it. "
            'Resume with that one, or start over with resume="never".'
        )
    for name, part in parts.items():
        if name == "user":
            _compare("objects", saved, parts)
        _load(name, part, saved[name])
    for name in [name for name in parts if name != "objects" or "user" not in parts]:
        _compare(name, saved, parts)
    if "user" in parts and (paths := differences(saved["objects"], parts["objects"].state_dict())):
        log.warning(
            "on_load_checkpoint sets %s to other values than the snapshot's, so a resumed run differs from an "
            "undisturbed one. Leave it out there: values set by training are restored without it",
            format_names([path.replace("//", ".", 1) for path in paths]),
        )


def _load(name: str, part: Stateful, saved: Any) -> None:
    try:
        part.load_state_dict(saved)
    except Exception as error:
        if isinstance(error, EngineError) or is_retryable(error):
            raise
        raise IdentityChanged(
            f"{name} cannot load the state that it saved: {error}\n"
            'Resume with the module of the snapshot, or start over with resume="never".'
        ) from error


def _compare(name: str, saved: Mapping[str, Any], parts: Mapping[str, Stateful]) -> None:
    try:
        now = parts[name].state_dict()
    except (AttributeError, TypeError) as error:  # an object could not be restored and is None; a warning named it
        raise ReadBackDiffers(
            f"{name} has no state after the snapshot was restored: {type(error).__name__}: {error}. "
            "The earlier warning names the lost part: build it in __init__, setup or on_load_checkpoint."
        ) from error
    if paths := differences(saved[name], now):
        raise ReadBackDiffers(
            f"{name} did not restore the state it returned: {format_names(paths)}. "
            "Its state_dict must return everything that load_state_dict needs, bit for bit. If a warning named a lost "
            "part, build it in __init__, setup or on_load_checkpoint."
        )
