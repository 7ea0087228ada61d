"""Names hooks that change a training while a snapshot is taken.

An example is `optimizer.eval()` in `on_save_checkpoint`. A run that is not interrupted, or takes its snapshots
elsewhere, trains on with other values than a resumed one.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from midstride.engine.checkpointing.restore_check import copied_with_digests
from midstride.engine.formatting import format_names
from midstride.engine.state.differences import differences
from midstride.engine.state.stateful import Stateful

__all__ = ["HookChanges"]

log = logging.getLogger(__name__)

#: parts that hooks of a snapshot add to, or that count samples and batches read
_LEFT_OUT = frozenset({"user", "samples", "feeds", "logged", "progress"})
#: largest number of differences that are named
_MOST = 3


class HookChanges:
    """Compares the state before and after each hook that runs while a snapshot is taken.

    Args:
        parts: returns the parts of the state, by name.
    """

    def __init__(self, parts: Callable[[], Mapping[str, Stateful]]) -> None:
        self._parts, self._is_on = parts, False
        self._last: dict[str, Any] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Compare in the block; it takes the time of a few digests of the state."""
        self._is_on = True
        try:
            yield
        finally:
            self._is_on, self._last = False, {}

    def begin(self) -> None:
        """Record the state before the first hook."""
        if self._is_on:
            self._last = self._state()

    def after(self, hook: str) -> None:
        """Warn if the hook called `hook` has changed the state."""
        if not self._is_on:
            return
        before, self._last = self._last, self._state()
        if found := differences(before, self._last):
            log.warning(
                "%s changes the training while a snapshot is taken: %s. The snapshot can mix old and new values, and "
                "a run without snapshots would train differently. Restore them before the hook returns",
                hook,
                format_names(found, _MOST),
            )

    def _state(self) -> dict[str, Any]:
        parts = self._parts()
        return {name: copied_with_digests(parts[name].state_dict()) for name in parts if name not in _LEFT_OUT}
