"""The state of a run: parts that can say what they are and become it again.

Law: after `b.load_state_dict(a.state_dict())`, whatever `a` would do next, `b` does
next, bit for bit. `tests/laws/` holds every part to it, and every resume checks it:
what was loaded is asked for its state again and compared with what was saved.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

from midstride.engine.errors import EngineError, IdentityChanged, ReadBackDiffers
from midstride.engine.formatting import format_names
from midstride.engine.state.differences import differences

__all__ = ["AlikeOnRanks", "Reshardable", "Stateful", "restore_parts", "state_of"]

log = logging.getLogger(__name__)


@runtime_checkable
class Stateful(Protocol):
    """Anything that can say what it is and become it again."""

    def state_dict(self) -> dict[str, Any]:
        """Return everything that decides what this part does next."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Become the part that gave `state_dict`."""
        ...


@runtime_checkable
class Reshardable(Protocol):
    """A part whose state is not the same on every rank."""

    def resharded(self, states: Sequence[Any], rank: int) -> Any:
        """Return the state of `rank` in a new world, given that of every rank of the old one."""
        ...


class AlikeOnRanks:
    """A part that is the same on every rank, unless user code has made it differ."""

    in_words: ClassVar[str]  #: what it holds, for a warning

    def resharded(self, states: Sequence[dict[str, Any]], rank: int) -> dict[str, Any]:
        """Return what all ranks have; rank 0's, with a warning, where they differ."""
        for other, state in enumerate(states):
            if paths := differences(states[0], state):
                log.warning(
                    "%s differs between the ranks of the snapshot (rank 0 and rank %d: %s); every rank of this world "
                    "of another size goes on with rank 0's",
                    self.in_words,
                    other,
                    ", ".join(paths[:3]),
                )
                break
        return dict(states[0])


def state_of(parts: Mapping[str, Stateful]) -> dict[str, Any]:
    """Return the tree of a run's state, one branch per part."""
    return {name: part.state_dict() for name, part in parts.items()}


def restore_parts(parts: Mapping[str, Stateful], saved: Mapping[str, Any]) -> None:
    """Load every part in the order given, then compare what each one holds with what was saved.

    The part "user" calls `on_load_checkpoint`, by which users may set attributes, the part "objects": those are
    compared before it, and a warning names what it sets.

    Raises:
        ReadBackDiffers: a part is missing on one side, or did not become what was saved (torch casts
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
    for name in [name for name in parts if name != "objects"]:
        _compare(name, saved, parts)
    if paths := differences(saved["objects"], parts["objects"].state_dict()):
        log.warning(
            "on_load_checkpoint sets %s otherwise than in the snapshot: a resumed run has that, and one that never "
            "died has not. What training sets comes back without it",
            format_names([path.replace("//", ".", 1) for path in paths]),
        )


def _load(name: str, part: Stateful, saved: Any) -> None:
    try:
        part.load_state_dict(saved)
    except EngineError:
        raise
    except Exception as error:
        raise IdentityChanged(
            f"{name} cannot take back the state it gave: {error}\n"
            'Resume with the module the snapshot was taken of, or start over with resume="never".'
        ) from error


def _compare(name: str, saved: Mapping[str, Any], parts: Mapping[str, Stateful]) -> None:
    try:
        now = parts[name].state_dict()
    except (AttributeError, TypeError) as error:  # an object stands there as None, which a warning has named
        raise ReadBackDiffers(
            f"{name} cannot give a state any more, now that the snapshot's is back: {type(error).__name__}: {error}. "
            "The warning before names what did not come back: build it in __init__ or setup, or in on_load_checkpoint."
        ) from error
    if paths := differences(saved[name], now):
        raise ReadBackDiffers(
            f"{name} did not take back the state it gave: {format_names(paths)}. "
            "What a state_dict returns must be all that load_state_dict needs, bit for bit."
        )
