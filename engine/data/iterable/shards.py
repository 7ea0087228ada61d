"""Reads an iterable data set shard by shard, in a worker or in the main process.

A shard corresponds to a worker in plain PyTorch: `get_worker_info()` returns its number and the number of shards to
user code. The number of worker processes does not matter, since each shard has its own iterator, and its own random
numbers for every batch.
"""

import copy
import logging
import sys
from collections.abc import Callable, Iterable
from typing import Any

from torch.utils.data import DataLoader, Dataset

from midstride.engine.data.iterable.collation import Collation
from midstride.engine.data.iterable.shard import Shard
from midstride.engine.data.iterable.shard_state import ShardRequest, ShardState
from midstride.engine.data.iterable.trial import Trial, try_stream
from midstride.engine.data.seeded_dataset import WorkerFailure
from midstride.engine.data.torch_internals import set_worker_info, worker_info
from midstride.engine.errors import EngineError
from midstride.engine.objects.generator_search import shared_memory

__all__ = ["ShardReader"]

log = logging.getLogger(__name__)


class ShardReader(Dataset[Any]):
    """Data set from `ShardRequest` to `ShardAnswer`, `ShardExhausted` or `WorkerFailure`.

    None maps to None.

    Args:
        loader: the user's loader over an iterable data set. Its `worker_init_fn` is called for each shard, and
            `drop_last` drops an incomplete last batch of a shard.
        key: hash that makes random numbers of this reader differ from those of others.
        where: name of the loader in errors.
        check_repeatability: whether to run `try_stream` first, which reads some batches more than once.
    """

    def __init__(self, loader: DataLoader[Any], *, key: int, where: str, check_repeatability: bool) -> None:
        # The loader itself is not kept, since this object is sent to workers.
        self.dataset: Any = loader.dataset
        self.batch_size, self.drop_last, self.key, self.where = loader.batch_size, loader.drop_last, key, where
        #: number of workers that `get_worker_info()` returns; 0 if it returns None
        self.shards = 0
        #: whether each shard of each pass reads a copy; not if a process reads only one shard in its lifetime
        self.copies = True
        self.set_functions(loader.collate_fn, loader.worker_init_fn)
        self.check_repeatability = check_repeatability
        self._uncopied = False
        self._is_live = self.is_whole = self._tries_whole = False
        self._shared: list[object] = []
        self._trial: Trial | None = None
        self._open: dict[int, Shard] = {}

    @property
    def is_shared(self) -> bool:
        """Whether the data set itself is read, as it uses the module or cannot be copied."""
        return self._is_live or self._uncopied

    def set_functions(self, collate: Callable[[Any], Any], init: Callable[[int], None] | None) -> None:
        """Set collate_fn, and the worker_init_fn of each opened shard, before workers start."""
        self.collation, self.init = Collation(collate), init

    def read_live(self) -> None:
        """Read the data set itself, and each batch once, since it refers to the module in training."""
        self._is_live = True

    def share(self, objects: Iterable[object]) -> None:
        """Do not copy these objects of the data set, which training may change, except in the trial."""
        self._shared = list(objects)

    def read_whole(self, where: str, *, is_tried: bool) -> None:
        """Read the data set itself for loader `where`; a trial, if `is_tried`, reads copies."""
        self.where = where
        self._is_live = self.is_whole = True
        self._tries_whole = is_tried

    @property
    def trial(self) -> Trial | None:
        """The result of the trial; None before it ends."""
        return self._trial

    def read_again(self, epoch: int, batches: int, *, to_end: bool) -> int:
        """Read an earlier pass's first batches, and its end if `to_end`; return their digest."""
        outer = worker_info()
        try:
            shard = Shard(self, ShardRequest(-1 - epoch, epoch, 0, batches, None), None, states=0)
            if to_end:
                shard.next_digest()
            return shard.digest
        finally:
            set_worker_info(outer)

    def begin_pass(self, shards: int, *, copies: bool) -> None:
        """Set the number of shards of the next pass; called before workers are started."""
        self.shards, self.copies = shards, copies

    def open(self, requests: Iterable[ShardRequest]) -> WorkerFailure | None:
        """Open shards in this process, on copies of the data set; return an error, if any."""
        outer = worker_info()
        try:
            for request in requests:
                self._open[request.shard] = self._open_shard(request)
        except EngineError as error:
            return WorkerFailure.caught(error)
        finally:
            set_worker_info(outer)
        return None

    def __getitem__(self, request: ShardRequest | None) -> Any:
        if request is None:
            return None
        shard = self._open.get(request.shard)
        outer = worker_info()
        try:
            if shard is None or shard.number != request.number:
                shard = self._open[request.shard] = self._open_shard(request)
            else:
                set_worker_info(shard.info)
            return shard.read(in_worker=outer is not None)
        except EngineError as error:
            # torch would change the message of an exception.
            return WorkerFailure.caught(error)
        finally:
            set_worker_info(outer)

    def _open_shard(self, request: ShardRequest) -> Shard:
        """Return the shard of `request`, from its state if the trial trusts it, else replayed."""
        if self._trial is None:
            is_tried = self.check_repeatability and (not self._is_live or self._tries_whole)
            self._trial = self._try_stream(request) if is_tried else Trial()
        states = sys.maxsize if self._trial.refused is None else self._trial.passed
        if request.state is None or request.state.batch > states:
            return Shard(self, request, None, states=states)
        try:
            return Shard(self, request, request.state, states=states)
        except EngineError as error:
            log.warning(
                "%s\nIts state does not restore batch %d: all earlier batches are read again.",
                error,
                request.batch,
            )
            return Shard(self, request, None, states=0)

    def _try_stream(self, request: ShardRequest) -> Trial:
        """Return the result of `try_stream` on copies; warn if states cannot be used."""
        begin = request._replace(batch=0, state=None, digest=None)
        self.dataset_for_pass(copied=True, for_trial=True)
        if self._uncopied:
            return Trial("it cannot be copied, so its state cannot be tried")

        def opened(saved: ShardState | None, stateful: bool) -> Shard:
            at = begin._replace(batch=saved.batch if saved else 0)
            return Shard(self, at, saved, states=sys.maxsize if stateful else 0, copied=True)

        trial = try_stream(opened, self.batch_size or 1, self.where)
        warns = request.shard == 0 and request.number == 1  # workers of later passes repeat the trial
        if not trial.is_tried and warns:
            log.warning(
                "%s was not tested, since %d batches took %.2f s: whether its state_dict restores its position, and "
                "a second reading gives the same samples. The samples are compared when the run resumes.",
                self.where,
                trial.batches,
                trial.seconds,
            )
        if trial.refused is not None and warns:
            log.warning(
                "%s: its state_dict does not restore its position (%s). A resumed run reads the epoch again from its "
                "start%s; here %d batches took %.2f s.",
                self.where,
                trial.refused,
                f" after batch {trial.passed}" if trial.passed else "",
                trial.batches,
                trial.seconds,
            )
        return trial

    def dataset_for_pass(self, *, copied: bool = False, for_trial: bool = False) -> Any:
        """Return a copy of the data set, if possible, so that passes do not affect each other.

        Args:
            copied: copy it, even if passes read it itself.
            for_trial: it is read in the trial, also if it stands for a loader, which passes read itself.
        """
        is_live = self._is_live and not (for_trial and self.is_whole)
        if not (self.copies or copied) or self._uncopied or is_live:
            return self.dataset
        # Modules, which pipelines of torchdata hold, cannot be copied.
        shared = [*sys.modules.values(), *(self.dataset.not_copied() if self.is_whole else ())]
        shared += [*shared_memory(self.dataset).values(), *([] if for_trial else self._shared)]
        try:
            return copy.deepcopy(self.dataset, {id(one): one for one in shared})
        except Exception as error:
            if self.is_whole:
                self._uncopied = True
                return self.dataset
            log.warning(
                "%s: %s cannot be copied (%s). Its own changes during reading carry over to the next epoch; in "
                "workers they are lost when the run resumes. Open files and connections in __iter__, not in __init__.",
                self.where,
                type(self.dataset).__name__,
                error,
            )
            self._uncopied = True
            return self.dataset
