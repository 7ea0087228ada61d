"""Everything that is wrong with a job, found without training: `midstride check`."""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from midstride.engine.errors import EngineError, JobError
from midstride.engine.imports import user_error
from midstride.engine.job import TrainingJob
from midstride.engine.rehearsal import rehearse
from midstride.engine.snapshots.store import Store

if TYPE_CHECKING:
    from midstride.engine.module import DataModule, TrainingModule

__all__ = ["faults_in"]

T = TypeVar("T")


def faults_in(job: TrainingJob) -> list[str]:
    """Return every fault of `job`, in words: imports, arguments, store, and what only a step or an evaluation can say.

    The data is prepared on the way, as a run would do first. The store gets one small file, which is
    removed again. One step is taken, and one batch of validation and test, in this process alone.
    """
    faults: list[str] = []
    module = _collect(faults, "building the module", job.build_module)
    data = _collect(faults, "building the data", job.build_data)
    _collect(faults, "trying the store", lambda: Store.open(job.store_url, job.store_terms).ensure_writable())
    if module is not None and data is not None:
        _collect(faults, "checking the training", lambda: faults.extend(_training_faults(job, module, data)))
    return [*dict.fromkeys(faults)]  # a file that cannot be imported fails for module and data alike


def _collect(faults: list[str], doing: str, part: Callable[[], T]) -> T | None:
    """Return what `part` gives; if it raises, add that to `faults`."""
    try:
        return part()
    except JobError as error:  # the first line counts them
        faults += [line.strip() for line in str(error).splitlines()[1:]]
    except EngineError as error:
        faults.append(str(error))
    except Exception as error:
        faults.append(str(user_error(error, doing)))
    return None


def _training_faults(job: TrainingJob, module: "TrainingModule", data: "DataModule") -> list[str]:
    data.prepare_data()
    return job.build_trainer().check(module, data, processes=job.world.processes) or rehearse(job, module, data)
