"""Finds data that training changes within an epoch: a run could not resume there."""

import logging

from midstride.engine.training.checkpointing.unsaved_state import is_checked_at
from midstride.engine.training.context import FitContext

__all__ = ["DataChanges"]

log = logging.getLogger(__name__)

#: whether the loader has a length -> advice
_WAYS_OUT = {
    True: "with num_workers=0 they are taken anywhere",
    False: "a data set with state_dict and load_state_dict is taken up anywhere",
}


class DataChanges:
    """Allows snapshots anywhere, until data change within an epoch; then between epochs only.

    Args:
        context: context of the fit.
    """

    def __init__(self, context: FitContext) -> None:
        self._context, self._checks, self._has_changed = context, 0, False
        loader = context.loaders.training
        # For map-style data it is known now whether they can change; all ranks check if those of one rank can.
        self._is_checked = any(context.collective.gather(not loader.is_sized or loader.changed_in_pass() is not None))

    def allow_snapshot(self) -> bool:
        """Return whether a run can resume from here; every rank calls this at the same boundary."""
        progress, loader = self._context.progress, self._context.loaders.training
        if progress.at_end or progress.batch == 0 or not self._is_checked:
            return True
        self._checks += not self._has_changed
        if not self._has_changed and is_checked_at(self._checks):
            changes = [*filter(None, self._context.collective.gather(loader.changed_in_pass()))]
            self._has_changed = bool(changes)
            if changes and self._context.world.is_first:
                log.warning(
                    "%s. A run that dies inside an epoch could not read the rest of it again, so snapshots are taken "
                    "at the ends of epochs only; %s",
                    changes[0],
                    _WAYS_OUT[loader.is_sized],
                )
        return not self._has_changed
