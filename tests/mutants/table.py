"""All planted bugs."""

from mutants.around import AROUND
from mutants.calls import CALLS
from mutants.changes import CHANGES
from mutants.copies import COPIES
from mutants.data import DATA
from mutants.ddp import DDP
from mutants.devices import DEVICES
from mutants.errors import ERRORS
from mutants.horovod import HOROVOD
from mutants.lanes import LANES
from mutants.loggers import LOGGERS
from mutants.sets import SETS
from mutants.snapshots import SNAPSHOTS
from mutants.training import TRAINING
from mutants.worlds import WORLDS

__all__ = ["MUTANTS"]

MUTANTS = [
    *TRAINING,
    *DATA,
    *COPIES,
    *CHANGES,
    *DDP,
    *SETS,
    *SNAPSHOTS,
    *LANES,
    *DEVICES,
    *LOGGERS,
    *WORLDS,
    *HOROVOD,
    *ERRORS,
    *CALLS,
    *AROUND,
]
