"""The unsaved state: what no snapshot holds, and what user code could still keep a count in.

Class attributes, globals of the user's modules and large data are looked at when training begins, at its first
snapshots and then ever more rarely. What has changed by then is named, once: a resumed run would not have it.
"""

import logging
from collections.abc import Callable, Iterator, Mapping

from midstride.engine.formatting import format_names
from midstride.engine.objects.digest import digest_lines

__all__ = ["UnsavedStateMonitor", "is_looked_at"]

log = logging.getLogger(__name__)

#: first snapshots at which it looks; after them, at those whose number is a power of two
CHECKS = 5
#: names in one warning
MOST = 10


class UnsavedStateMonitor:
    """Names what changes in training and is no state.

    Args:
        watched: yields it by name; a monitor is made when training begins.
    """

    def __init__(self, watched: Callable[[], Iterator[tuple[str, object]]]) -> None:
        self._watched, self._snapshots = watched, 0
        self._reported: set[str] = set()
        self._before = self._lines()

    def check(self) -> None:
        """Compare with the beginning; called at every snapshot."""
        self._snapshots += 1
        if not is_looked_at(self._snapshots):
            return
        now = self._lines()
        self._before |= {name: lines for name, lines in now.items() if self._is_of_new_code(name)}
        changed = {
            name: line
            for name in [*self._before, *(name for name in now if name not in self._before)]
            if name not in self._reported and (line := _change(self._before.get(name, {}), now.get(name, {})))
        }
        if changed:
            self._reported.update([*changed][:MOST])  # the next look names what is left out here
            log.warning(
                "changed in training, and is part of no snapshot: %s. If it decides what is trained, keep it in an "
                "attribute of the module, or by on_save_checkpoint and on_load_checkpoint",
                format_names([*changed.values()], MOST),
            )

    def _is_of_new_code(self, name: str) -> bool:
        """Return whether `name` is of a module, a class or a function that was imported since."""
        if name in self._before:
            return False
        if name.startswith("library function "):  # some load theirs when first asked
            return True
        if not name.startswith(("global ", "class ", "function ")):
            return False
        owner = name.partition(": ")[0] if ": " in name else name.rpartition(".")[0]
        return not any(known.startswith(owner) for known in self._before)

    def _lines(self) -> dict[str, dict[str, str]]:
        return {name: digest_lines(name, value) for name, value in self._watched()}


def is_looked_at(snapshot: int) -> bool:
    """Return whether changes are looked for at that snapshot, counted from 1."""
    return snapshot <= CHECKS or snapshot.bit_count() == 1


def _change(before: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """Return the first line that changed, and how many more did."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if not names:
        return None
    more = f" with {len(names) - 1} more in it" if len(names) > 1 else ""
    return f"{names[0]} ({before.get(names[0], 'missing')}, now {now.get(names[0], 'missing')}){more}"
