"""Whether training changes what it reads in the middle of an epoch: then a run cannot go on from there."""

import logging

from midstride.engine.training.checkpointing.unsaved_state import is_looked_at
from midstride.engine.training.context import FitContext

__all__ = ["DataChanges"]

log = logging.getLogger(__name__)

#: of loaders of data sets with a length, and of streams
_WAYS_OUT = {
    True: "with num_workers=0 they are taken anywhere",
    False: "a data set with state_dict and load_state_dict is taken up anywhere",
}


class DataChanges:
    """Says where snapshots may be taken: anywhere, until data change that a resumed run would have to read again.

    Args:
        context: of the fit.
    """

    def __init__(self, context: FitContext) -> None:
        self._context, self._asked, self._found = context, 0, False
        loader = context.loaders.training
        # Of map-style data that is known now, and only some ranks' may be such; the others join in all the same.
        self._is_asked = any(context.collective.gather(not loader.is_sized or loader.changed_in_pass() is not None))

    def allow_snapshot(self) -> bool:
        """Return whether a run can go on from here; every rank calls this at the same boundary."""
        progress, loader = self._context.progress, self._context.loaders.training
        if progress.at_end or progress.batch == 0 or not self._is_asked:
            return True
        self._asked += not self._found
        if not self._found and is_looked_at(self._asked):
            found = [*filter(None, self._context.collective.gather(loader.changed_in_pass()))]
            self._found = bool(found)
            if found and self._context.world.is_first:
                log.warning(
                    "%s. A run that dies inside an epoch could not read the rest of it again, so snapshots are taken "
                    "at the ends of epochs only; %s",
                    found[0],
                    _WAYS_OUT[loader.is_sized],
                )
        return not self._found
