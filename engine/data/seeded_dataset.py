"""Wraps the user's data set and collate_fn, with random numbers by position in the epoch."""

import pickle
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch.utils.data import Dataset, get_worker_info

from midstride.engine.data.bad_samples import ON_REQUEST, BadSample, PartialBatch
from midstride.engine.data.data_check import CheckedSamples, SampleCheck, samples_digest
from midstride.engine.data.order import BatchRequest
from midstride.engine.data.rng.per_sample import SampleSeeder
from midstride.engine.data.rng.repeatability import collate_name
from midstride.engine.data.worker_memory import full_message
from midstride.engine.errors import EngineError, NotExact, UserCodeError, UserError, WorldError
from midstride.engine.user_code import is_retryable

__all__ = ["Idle", "SeededCollate", "SeededDataset", "WorkerFailure", "format_indices"]

_OWN = frozenset({"dataset", "seeds", "failure", "skips_bad", "left_out"})


class WorkerFailure(NamedTuple):
    """Error with a batch, returned by a worker, as torch would change a raised message."""

    kind: type[EngineError]
    text: str
    #: the exception of the user's code, pickled; None if it cannot be pickled
    cause: bytes | None = None

    @classmethod
    def of(cls, where: str, error: Exception) -> "WorkerFailure":
        """Return that of `error`, raised in `where` by the user's code, or as it is given memory."""
        if message := full_message(error):
            return cls(WorldError, f"{message}\nraised in {where}")
        return cls(UserCodeError, str(UserCodeError.of(where, error)), _pickled(error))

    @classmethod
    def caught(cls, error: EngineError) -> "WorkerFailure":
        """Return that of an error of the engine, with the exception that caused it."""
        return cls(type(error), str(error), _pickled(error.__cause__))

    def error(self, where: str) -> EngineError:
        """Return the error to raise, whose message ends with `where`."""
        error = self.kind(f"{self.text}{where}")
        if self.cause is not None:
            error.__cause__ = pickle.loads(self.cause)
        return error


class Idle(NamedTuple):
    """Request without samples, and its answer, to skip a worker in torch's turn."""


class _FetchedBatch(NamedTuple):
    """Samples of a batch, its request, and the unreadable samples, for collate_fn."""

    samples: list[Any]
    request: BatchRequest
    bad: tuple[BadSample, ...] = ()


class SeededDataset(Dataset[Any]):
    """The user's data set, with a seed per sample."""

    def __init__(self, dataset: Any, seeds: SampleSeeder) -> None:
        self.dataset = dataset
        self.seeds = seeds
        #: whether samples whose reading raises an error are left out
        self.skips_bad = False
        #: indices of samples that are not read
        self.left_out: frozenset[int] = frozenset()
        #: error at the start of the worker
        self.failure: WorkerFailure | None = None

    def __getattr__(self, name: str) -> Any:
        # For users' code that reads `get_worker_info().dataset`. The check is needed for unpickling.
        if name in _OWN:
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # For a worker_init_fn that sets attributes of the data set, such as open files.
        if name in _OWN:
            super().__setattr__(name, value)
        else:
            setattr(self.dataset, name, value)

    def skip_bad_samples(self) -> None:
        """Leave out samples whose reading raises an error."""
        self.skips_bad = True

    def leave_out(self, indices: Iterable[int]) -> None:
        """Read no sample of `indices`."""
        self.left_out = frozenset(indices)

    def set_failure(self, failure: WorkerFailure) -> None:
        """Answer every request with `failure`, since the start of the worker failed."""
        self.failure = failure

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(
        self, fetch: BatchRequest | SampleCheck | Idle
    ) -> _FetchedBatch | WorkerFailure | CheckedSamples | Idle:
        if isinstance(fetch, Idle):
            return fetch
        if isinstance(fetch, SampleCheck):
            return self._checked(fetch)
        if self.failure is not None:
            return self.failure
        if self.seeds.side_effects is not None:
            self.seeds.side_effects.begin()
        try:
            return self._fetched(fetch)
        except UserError as error:
            return WorkerFailure(type(error), str(error))
        except Exception as error:
            if self.skips_bad and not is_retryable(error):
                return self._readable(fetch)
            name = type(self.dataset).__name__
            where = f"{name}, reading samples {format_indices(fetch.indices)}{_worker_text()}"
            where += self._out_of_range(error, fetch)
            return WorkerFailure.of(where, error)

    def _fetched(self, fetch: BatchRequest) -> _FetchedBatch:
        if self.left_out and not self.left_out.isdisjoint(fetch.indices):
            return self._readable(fetch)
        return _FetchedBatch(self.seeds.samples(fetch, self.dataset), fetch)

    def _readable(self, fetch: BatchRequest) -> _FetchedBatch:
        """Return the readable samples of a batch, each with random numbers of its position."""
        samples, bad = list[Any](), list[BadSample]()
        for number, index in enumerate(fetch.indices):
            if index in self.left_out:
                bad.append(BadSample(str(index), ON_REQUEST))
                continue
            one = fetch._replace(first=fetch.first + number * fetch.stride, indices=[index], probe=1)
            try:
                samples += self.seeds.samples(one, self.dataset)
            except UserError:
                raise
            except Exception as error:
                if not self.skips_bad or is_retryable(error):
                    raise
                bad.append(BadSample(str(index), f"{type(error).__name__}: {error}"))
        return _FetchedBatch(samples, fetch, tuple(bad))

    def _checked(self, check: SampleCheck) -> CheckedSamples | WorkerFailure:
        """Return the digests of samples; an error in reading them is that of a batch."""
        if self.failure is not None:
            return self.failure
        digests = []
        for request in check.requests:
            # Read with the seeds of generators that are found to be used: see SampleSeeder.
            fetched = self.__getitems__(request._replace(probe=1))
            if isinstance(fetched, WorkerFailure):
                return fetched
            assert isinstance(fetched, _FetchedBatch)
            digests.append(samples_digest(fetched.samples))
        return CheckedSamples(tuple(digests))

    def _out_of_range(self, error: Exception, fetch: BatchRequest) -> str:
        length = len(self.dataset) if hasattr(self.dataset, "__len__") else None
        beyond = [index for index in fetch.indices if type(index) is int and length is not None and index >= length]
        if not beyond or not isinstance(error, (IndexError, KeyError)):
            return ""
        return f"; the sampler gave {format_indices(beyond)}, the data set has {length} samples"


class SeededCollate:
    """The user's collate_fn, called with random numbers of the batch.

    Args:
        collate: the user's collate_fn.
        seeds: seeds the generators.
        single: whether it takes one sample instead of a list, as with `batch_size=None`.
    """

    def __init__(self, collate: Callable[[Any], Any], seeds: SampleSeeder, *, single: bool) -> None:
        self.collate, self.seeds, self.single = collate, seeds, single

    def set_collate(self, collate: Callable[[Any], Any]) -> None:
        """Set the collate_fn; called before workers are started."""
        self.collate = collate

    def __call__(self, fetched: _FetchedBatch | WorkerFailure | CheckedSamples | Idle) -> Any:
        """Return the batch of the samples; other answers unchanged."""
        if isinstance(fetched, (WorkerFailure, CheckedSamples, Idle)):
            return fetched
        samples, fetch, bad = fetched
        if bad:
            return self._partial(fetched)
        try:
            batch = self.seeds.collate(fetch, samples[0] if self.single else samples, self.collate)
            self.seeds.check_side_effects(fetch, batch, self.collate, single=self.single)
            return batch
        except NotExact as error:
            return WorkerFailure(NotExact, str(error))
        except Exception as error:
            where = f"{collate_name(self.collate)}, collating samples {format_indices(fetch.indices)}{_worker_text()}"
            return WorkerFailure.of(where, error)

    def _partial(self, fetched: _FetchedBatch) -> PartialBatch | WorkerFailure:
        """Return the batch of the samples that could be read."""
        samples, fetch, bad = fetched
        if not samples:
            return PartialBatch(None, bad)
        try:
            batch = self.seeds.collate(fetch._replace(probe=0), samples[0] if self.single else samples, self.collate)
        except Exception as error:
            where = f"{collate_name(self.collate)}, collating samples {format_indices(fetch.indices)} without "
            return WorkerFailure.of(where + f"{len(bad)} that cannot be read{_worker_text()}", error)
        return PartialBatch(batch, bad)


def _pickled(cause: BaseException | None) -> bytes | None:
    """Return `cause` pickled, without its traceback; None if it cannot be loaded again."""
    try:
        data = pickle.dumps(cause)
        return data if isinstance(pickle.loads(data), Exception) else None
    except Exception:
        return None


def format_indices(indices: list[Any]) -> str:
    """Return `indices` as text, with at most 3 of them."""
    return str(indices) if len(indices) <= 4 else f"[{indices[0]}, {indices[1]}, ..., {indices[-1]}]"


def _worker_text() -> str:
    info = get_worker_info()
    return f", in worker {info.id}" if info else ""
