"""Warns of user state that changes in training and that no snapshot holds.

Class attributes, globals of the user's modules and large data are digested at the start of training, at the first
snapshots and the first one of each epoch, and then ever more rarely. Each path is reported once, when it has changed,
since a resumed run would lose it. What reading data changes by itself, such as a cache, is no state.
"""

import dis
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch.utils.data import IterableDataset

from midstride.engine.checkpointing.context import RunContext
from midstride.engine.data.loader import ResumableLoader
from midstride.engine.formatting import format_names
from midstride.engine.objects.digest import digest_lines
from midstride.engine.objects.generator_search import shared_memory
from midstride.engine.objects.kinds.plain import PLAIN
from midstride.engine.objects.roots import is_code
from midstride.engine.processes.preload import collector_paused

__all__ = ["IN_A_MODULE", "DataChanges", "UnsavedStateMonitor", "is_checked_at"]

log = logging.getLogger(__name__)

#: advice for a fit
IN_A_MODULE = "keep it in an attribute of the module, or by on_save_checkpoint and on_load_checkpoint"
#: number of first snapshots that are checked; later ones are if their number is a power of two
CHECKS = 5
#: largest number of names in one warning, and of lines of each
MAX_NAMES, MAX_LINES = 10, 3
#: end of the line that tells how many items a container holds
_HOLDS = " holds"


class UnsavedStateMonitor:
    """Warns of values that change in training and are not part of snapshots.

    Args:
        watched: yields names and values; they are compared with those at the time of the constructor.
        way_to_keep: advice on how to keep such a value.
        places: returns the places in snapshots of all objects that a restore fills, by their addresses.
    """

    def __init__(
        self,
        watched: Callable[[], Iterator[tuple[str, object]]],
        way_to_keep: str = IN_A_MODULE,
        places: Callable[[], Mapping[int, str]] = dict,
    ) -> None:
        self._watched, self._way_to_keep, self._snapshots = watched, way_to_keep, 0
        self._places = places
        self._built: Mapping[int, str] | None = None
        self._reported: set[str] = set()
        self._epoch: int | None = None
        #: lines that reading data changes, and prefixes of lines in containers that it fills
        self._read: set[str] = set()
        self._filled: tuple[str, ...] = ()
        #: lines of values that reading has loaded, by name: data that are restored do without until they are read
        self._loaded: dict[str, dict[str, str]] = {}
        self._before = self._lines()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Record changes in the block, in which data are read and nothing is trained."""
        before = self._lines()
        yield
        for name, now in self._lines().items():
            if name in before:
                self._read.update(_differing(before[name], now))
            else:
                self._loaded[name] = now
        self._before |= self._loaded
        self._filled = _insides_of_grown(self._read)

    def changed_by_reading(self) -> frozenset[str]:
        """Return the lines of values that reading data has changed."""
        return frozenset(self._read)

    def check(self, epoch: int | None = None) -> None:
        """Compare the values with those at the start of training; called at every snapshot."""
        self._snapshots += 1
        is_new, self._epoch = epoch != self._epoch, epoch
        if not is_new and not is_checked_at(self._snapshots):
            return
        now = self._loaded | self._lines()
        self._before |= {name: lines for name, lines in now.items() if self._is_of_new_code(name)}
        found = {
            name: self._new_changes(self._before.get(name, {}), now.get(name, {}))
            for name in [*self._before, *(name for name in now if name not in self._before)]
        }
        changed = [name for name, lines in found.items() if lines][:MAX_NAMES]  # the next check reports the others
        self._reported.update(line for name in changed for line in found[name])
        if changed:
            log.warning(
                "changed in training, and is part of no snapshot: %s. If it decides what is trained, %s",
                format_names([self._told(name, found[name], now.get(name, {})) for name in changed], MAX_NAMES),
                self._way_to_keep,
            )

    def _told(self, name: str, lines: Sequence[str], now: Mapping[str, str]) -> str:
        """Return text on the first changed lines of a value, and on the number of others."""
        before = self._before.get(name, {})
        texts = [f"{line} ({before.get(line, 'missing')}, now {now.get(line, 'missing')})" for line in lines]
        shown = [texts[0], *(text.removeprefix(name) for text in texts[1:MAX_LINES])]
        return ", ".join(shown) + (f" with {len(lines) - MAX_LINES} more in it" if len(lines) > MAX_LINES else "")

    def _new_changes(self, before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
        """Return the lines that differ, without reported ones and those that reading changes."""
        lines = [line for line in _differing(before, now) if line not in self._reported | self._read]
        grown = _insides_of_grown(self._reported)  # each further item needs no line of its own
        return [line for line in lines if not line.startswith(self._filled if line in before else self._filled + grown)]

    def _is_of_new_code(self, name: str) -> bool:
        """Return whether `name` is of a module, class or function imported since the start."""
        if name in self._before:
            return False
        if name.startswith("library function "):  # some libraries import on first use
            return True
        if name.startswith("function ") and ": " not in name:  # one set in training is a global's or a class's, too
            return True
        if not name.startswith(("global ", "class ", "function ")):
            return False
        owner = name.partition(": ")[0] if ": " in name else name.rpartition(".")[0]
        return not any(known.startswith(owner) for known in self._before)

    @collector_paused()  # what a check makes is gone after it
    def _lines(self) -> dict[str, dict[str, str]]:
        watched = dict(self._watched())
        filled = self._stayed() if any(map(_can_hold, watched.values())) else {}
        return {name: _lines_of(name, value, filled) for name, value in watched.items()}

    def _stayed(self) -> dict[int, str]:
        """Return the objects of snapshots that are where they were: a resumed run fills them."""
        now = self._places()
        if self._built is None:
            self._built = now
        return {address: f"kept as {place}" for address, place in self._built.items() & now.items()}


def _insides_of_grown(lines: Iterable[str]) -> tuple[str, ...]:
    """Return the prefixes of lines inside of containers whose lengths are in `lines`."""
    grown = [line.removesuffix(_HOLDS) for line in lines if line.endswith(_HOLDS)]
    return tuple(f"{container}{end}" for container in grown for end in "[.")


def is_checked_at(snapshot: int) -> bool:
    """Return whether to check for changes at the snapshot with this number, counted from 1."""
    return snapshot <= CHECKS or snapshot.bit_count() == 1


def _can_hold(value: object) -> bool:
    """Return whether `value` can be or hold an object that is in snapshots, too."""
    return type(value) not in PLAIN and not is_code(value)


def _lines_of(name: str, value: object, filled: Mapping[int, str]) -> dict[str, str]:
    """Return the digest of `value` without shared memory and values of `set_epoch`.

    Args:
        name: of the value.
        value: what is described.
        filled: texts for objects that a restore fills, by their addresses: their content is no part of the digest.
    """
    code = getattr(getattr(type(value), "set_epoch", None), "__code__", None)
    made = dis.get_instructions(code) if code else ()
    set_anew = {f"{name}.{one.argval}" for one in made if one.opname == "STORE_ATTR"}
    kept = tuple(f"{name}{path}" for path in shared_memory(value)) if isinstance(value, IterableDataset) else ()
    lines = digest_lines(name, value, filled).items()
    return {line: text for line, text in lines if line not in set_anew and not (kept and line.startswith(kept))}


def _differing(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    return [line for line in {**before, **now} if before.get(line) != now.get(line)]


#: whether the loader has a length -> advice
_WAYS_OUT = {
    True: "with num_workers=0 they are taken anywhere",
    False: "a data set with state_dict and load_state_dict resumes at any position",
}


class DataChanges:
    """Allows snapshots anywhere, until data change within an epoch; then between epochs only.

    Args:
        context: context of the run.
        loaders: loaders that an epoch reads.
    """

    def __init__(self, context: RunContext, loaders: Sequence[ResumableLoader]) -> None:
        self._context, self._loaders, self._checks, self._has_changed = context, loaders, 0, False
        # For map-style data it is known now whether they can change; all ranks check if those of one rank can.
        can_change = any(not loader.is_sized or loader.changed_in_pass() is not None for loader in loaders)
        self._is_checked = any(context.collective.gather(can_change))

    def allow_snapshot(self) -> bool:
        """Return whether a run can resume from here; every rank calls this at the same boundary."""
        progress = self._context.progress
        if progress.at_end or progress.batch == 0 or not self._is_checked:
            return True
        self._checks += not self._has_changed
        if not self._has_changed and is_checked_at(self._checks):
            changes = [*filter(None, self._context.collective.gather(self._change()))]
            self._has_changed = bool(changes)
            if changes and self._context.world.is_first:
                log.warning(
                    "%s. A run that dies inside an epoch could not read the rest of it again, so snapshots are taken "
                    "at the ends of epochs only; %s",
                    *changes[0],
                )
        return not self._has_changed

    def _change(self) -> tuple[str, str] | None:
        """Return text and advice on the first changed data of this pass; None without changes."""
        for loader in self._loaders:
            if (change := loader.changed_in_pass()) is not None:
                return change, _WAYS_OUT[loader.is_sized]
        return None
