"""All planted bugs, by subject."""

from mutants.table.data import DATA
from mutants.table.loops import LOOPS
from mutants.table.metrics import METRICS
from mutants.table.objects import OBJECTS
from mutants.table.processes import PROCESSES
from mutants.table.runs import RUNS
from mutants.table.snapshots import SNAPSHOTS
from mutants.table.strategies import STRATEGIES
from mutants.table.training import TRAINING

MUTANTS = [*OBJECTS, *DATA, *TRAINING, *LOOPS, *METRICS, *SNAPSHOTS, *STRATEGIES, *PROCESSES, *RUNS]
