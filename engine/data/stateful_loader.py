"""DataLoader with `state_dict` and `load_state_dict`, for loops other than the Trainer's."""

import base64
import logging
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from midstride.engine.data.accelerate_internals import accelerate_pass
from midstride.engine.data.dataloader_order import training_loader
from midstride.engine.data.iterable.loader import IterableLoader
from midstride.engine.data.loader import ResumableLoader
from midstride.engine.data.order import StridedOrder
from midstride.engine.data.rng.per_sample import Rng
from midstride.engine.errors import EngineError, NotExact, UserError
from midstride.engine.seeds import mix
from midstride.engine.state.codec import decode, encode
from midstride.engine.world import World

__all__ = ["StatefulDataLoader"]

log = logging.getLogger(__name__)

T_co = TypeVar("T_co", covariant=True)
_VERSION = 1
_KEYS = {"version", "epoch", "batch", "world_size", "order", "loader"}


class StatefulDataLoader(DataLoader[T_co]):
    """`DataLoader` whose state can be saved after any batch and continued in any process.

    It takes the arguments of `torch.utils.data.DataLoader`. Order and random numbers are functions of `seed`, epoch and
    the position of a sample, so the state is small, no batch is read again after a resume, and the number of workers
    may change. Each pass is an epoch, in the order of `torch.utils.data.DistributedSampler(seed=seed)`.

    Args:
        dataset: as for DataLoader.
        args: as for DataLoader.
        seed: seed of the order and of random numbers in the data; the same on every rank.
        rng: "lazy" gives each sample random numbers of its own, independent of the number of ranks; "batch" each batch.
        num_replicas: number of ranks that share the samples; by default that of `torch.distributed`, or 1.
        rank: this rank among them.
        snapshot_every_n_steps: accepted for torchdata's loader of this name, and ignored: `state_dict` is exact after
            every batch.
        kwargs: as for DataLoader.

    Raises:
        NotExact: data set or sampler give other samples when they are read again.
        UserError: there is no batch to read, or only one of `num_replicas` and `rank` is given.
    """

    #: makes Accelerate's `prepare` return it unchanged, since the loader that it would build has no such state
    _is_accelerate_prepared = True

    def __init__(
        self,
        dataset: Dataset[T_co],
        *args: Any,
        seed: int = 0,
        rng: Rng = "lazy",
        num_replicas: int | None = None,
        rank: int | None = None,
        snapshot_every_n_steps: int | None = None,
        **kwargs: Any,
    ) -> None:
        if (num_replicas is None) != (rank is None):
            raise UserError(f"num_replicas={num_replicas} and rank={rank}: give both, or neither.")
        super().__init__(dataset, *args, **kwargs)
        self._plain: DataLoader[T_co] = DataLoader(dataset, *args, **kwargs)
        self._seed = seed
        self._rng: Rng = rng
        self._num_replicas, self._rank = num_replicas, rank
        self._resumable: ResumableLoader | None = None
        self._epoch = self._batch = 0
        #: whether a pass over `_epoch` has begun, so that the next pass is over the epoch after it
        self._has_begun = False
        #: whether the next pass begins at `_batch`
        self._is_loaded = False

    def set_epoch(self, epoch: int) -> None:
        """Set the next pass's epoch, from batch 0 unless a state of that epoch was just loaded."""
        if self._has_begun or epoch != self._epoch:
            self._epoch, self._batch, self._has_begun, self._is_loaded = epoch, 0, False, False

    def __len__(self) -> int:
        """Return the batches in an epoch on this rank; those that an iterable data set claims."""
        return len(self._reader) if self._reader.is_sized else super().__len__()

    def __iter__(self) -> Iterator[T_co]:  # type: ignore[override]  # torch names a private class
        """Iterate over the rest of the epoch whose state was loaded, or else over the next epoch.

        Raises:
            UserCodeError: the data raised; `except` finds it by the class of that exception, too.
            WorldError: a worker was lost or too slow; a RuntimeError, as torch raises.
        """
        if self._has_begun:
            self._epoch += 1
        if not self._is_loaded:
            self._batch = 0
        reader, epoch = self._reader, self._epoch
        self._has_begun, self._is_loaded = True, False
        try:
            with accelerate_pass(self._remainder) as current:
                for batch in reader.batches(epoch, self._batch):
                    self._batch += 1
                    current.returns(is_last=reader.at_end)
                    yield batch
        except EngineError as error:
            if isinstance(error.__cause__, StopIteration):  # a generator would take it for its end
                raise
            raise error.as_instance_of_cause() from error.__cause__
        if reader is self._resumable and epoch == self._epoch:
            self._epoch, self._batch, self._has_begun = epoch + 1, 0, False

    def _remainder(self) -> int:
        """Return the number of samples in the last batch of all ranks, as `AcceleratePass` has it."""
        order = getattr(self._reader, "order", None)
        if not isinstance(order, StridedOrder) or order.own:
            return -1
        samples, ranks = len(order.sequence), order.size
        repeated = -samples % ranks
        # Ranks share samples in strides, so each repeated sample is the last one of its rank's batch.
        last = (order.rank_samples() - 1) % order.batch_size + 1
        if repeated > 1 and last > 1 and not order.drop_last:
            log.warning(
                "gather_for_metrics counts %d samples twice: %d samples do not divide among %d ranks. Pass a torch "
                "DataLoader to accelerator.prepare for this evaluation",
                repeated,
                samples,
                ranks,
            )
            return -1
        return 0 if order.drop_last else samples % order.global_batch_size

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last read batch, as plain values for `torch.save` or JSON.

        With a map-style data set, it is the same on every rank, can be loaded with another number of ranks, and is
        below 1 KB unless a user's sampler gives the order. With an iterable one, each rank has a state of its own.
        """
        reader = self._reader
        return {
            "version": _VERSION,
            "epoch": self._epoch,
            "batch": self._batch,
            "world_size": self._world.size,
            "order": {"seed": self._seed, "rng": self._rng, **reader.order_identity()},
            "loader": _with_sampler(reader.state_dict(), _as_plain),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next pass start where `state_dict` was taken; a running pass is abandoned.

        Raises:
            NotExact: this loader would read other samples, or cannot start at that position.
            UserError: it is not a state of a StatefulDataLoader of this version.
        """
        if set(state_dict) != _KEYS or state_dict["version"] != _VERSION:
            raise UserError(
                f"not a state of a StatefulDataLoader, version {_VERSION}: it has {sorted(state_dict)}, version "
                f"{state_dict.get('version')!r}; {sorted(_KEYS)} are needed."
            )
        self._resumable = None  # a new reader, since this one may have begun a pass
        batch = self._resume_batch(state_dict)
        self._reader.load_state_dict(_with_sampler(state_dict["loader"], _from_plain))
        self._reader.restored()
        self._epoch, self._batch = state_dict["epoch"], batch
        self._has_begun, self._is_loaded = False, True

    def _resume_batch(self, state: dict[str, Any]) -> int:
        """Return the number of the batch of this rank to start with.

        Raises:
            NotExact: the order differs, or there is no such batch.
        """
        reader, ranks = self._reader, self._world.size
        then = dict(state["order"])
        now = {"seed": self._seed, "rng": self._rng, **reader.order_identity()}
        before, after = (order.pop("global_batch_size", None) for order in (then, now))
        for name in sorted({*then, *now}):
            if then.get(name) != now.get(name):
                raise NotExact(
                    f"the state was taken with {name}={then.get(name)!r}, this loader has {now.get(name)!r}: it would "
                    "read other samples. Build the loader as it was, or start without the state."
                )
        if state["world_size"] != ranks and reader.fixed_world is not None:
            raise NotExact(f"{state['world_size']} ranks took the state, this is one of {ranks}: {reader.fixed_world}.")
        if before == after or not state["batch"]:
            return int(state["batch"])
        samples = state["batch"] * before
        if samples % after:
            raise NotExact(
                f"the state is from after {samples} samples of its epoch ({state['batch']} batches of {before} over "
                f"all ranks), and batches of {after} do not end there. Choose a batch_size with which all ranks "
                f"together read a divisor of {samples}, such as {before}, or load a state from an epoch's end."
            )
        return int(samples // after)

    @property
    def _world(self) -> World:
        if self._num_replicas is not None and self._rank is not None:
            return World(rank=self._rank, size=self._num_replicas)
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            return World(rank=distributed.get_rank(), size=distributed.get_world_size())
        return World()

    @property
    def _reader(self) -> ResumableLoader:
        """Resumable loader, built on first use, since the process group may come later."""
        if self._resumable is None:
            self._resumable = self._build_reader()
        return self._resumable

    def _build_reader(self) -> ResumableLoader:
        world = self._world
        if isinstance(self.dataset, IterableDataset):
            key = mix(mix(self._seed, 0), world.rank)
            checked = self._rng == "lazy"
            return IterableLoader(self._plain, name="the loader", key=key, limit=1.0, check_repeatability=checked)
        shard = world.size > 1
        return training_loader(self._plain, world, seed=self._seed, shard=shard, limit=1.0, rng=self._rng)


def _with_sampler(state: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a reader's state with that of its sampler changed, if it has one."""
    return {**state, "sampler": change(state["sampler"])} if "sampler" in state else state


def _as_plain(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state as JSON values, since `torch.load` refuses arrays of numpy."""
    if not state:  # most often, and after every batch
        return {"document": {}, "tensors": {}}
    encoded = encode(state)
    return {"document": encoded.document, "tensors": {name: _as_text(one) for name, one in encoded.tensors.items()}}


def _as_text(tensor: Tensor) -> dict[str, Any]:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": [*tensor.shape], "base64": base64.b64encode(data).decode()}


def _from_plain(plain: dict[str, Any]) -> Any:
    """Return the state that `_as_plain` was given."""
    return decode(plain["document"], {name: _from_text(text) for name, text in plain["tensors"].items()})


def _from_text(text: dict[str, Any]) -> Tensor:
    data, dtype = bytearray(base64.b64decode(text["base64"])), getattr(torch, text["dtype"])
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(text["shape"])
