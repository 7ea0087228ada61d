"""The unsaved state: what no snapshot holds, and what user code could still keep a count in.

Class attributes, globals of the user's files and large data are looked at when training begins, at its first snapshots
and then ever more rarely. What has changed by then is named, once: a resumed run would not have it.
"""

import logging
from collections.abc import Callable, Iterator, Mapping

from midstride.engine.objects.digest import digest_lines

__all__ = ["UnsavedStateMonitor", "is_looked_at"]

log = logging.getLogger(__name__)

#: first snapshots at which it looks; after them, at those whose number is a power of two
CHECKS = 5


class UnsavedStateMonitor:
    """Names what changes in training and is no state.

    Args:
        watched: yields it by name; a monitor is made when training begins.
    """

    def __init__(self, watched: Callable[[], Iterator[tuple[str, object]]]) -> None:
        self._watched, self._snapshots, self._is_told = watched, 0, False
        self._before = self._lines()

    def check(self) -> None:
        """Compare with the beginning; called at every snapshot."""
        self._snapshots += 1
        if self._is_told or not is_looked_at(self._snapshots):
            return
        now = self._lines()
        if changed := [*_changed(self._before, now)]:
            self._is_told = True
            shown = ", ".join(changed[:5]) + (f" and {len(changed) - 5} more" if len(changed) > 5 else "")
            log.warning(
                "changed in training, and is part of no snapshot: %s. If it decides what is trained, keep it in an "
                "attribute of the module, or by on_save_checkpoint and on_load_checkpoint",
                shown,
            )

    def _lines(self) -> dict[str, str]:
        lines: dict[str, str] = {}
        for name, value in self._watched():
            lines.update(digest_lines(name, value))
        return lines


def is_looked_at(snapshot: int) -> bool:
    """Return whether changes are looked for at that snapshot, counted from 1."""
    return snapshot <= CHECKS or snapshot.bit_count() == 1


def _changed(before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    for name in [*before, *(name for name in now if name not in before)]:
        if before.get(name) != now.get(name):
            yield f"{name} ({before.get(name, 'missing')}, now {now.get(name, 'missing')})"
