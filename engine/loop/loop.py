"""`Loop`: exact resume for a training loop of the user's own."""

import atexit
import logging
import os
import weakref
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from midstride.engine.checkpointing.context import RunContext
from midstride.engine.checkpointing.determinism import Determinism
from midstride.engine.checkpointing.finite_losses import FiniteLosses
from midstride.engine.checkpointing.reporter import Reporter
from midstride.engine.checkpointing.run_store import Resume
from midstride.engine.config.loggers import LoggerOptions
from midstride.engine.config.options import SnapshotOptions
from midstride.engine.data.resolve import LoaderSettings
from midstride.engine.errors import EngineError, JobError, UserError
from midstride.engine.fault_injection import FaultPlan, PhaseWatcher
from midstride.engine.loop.attempt import LEFT_BY_BREAK, Attempt
from midstride.engine.loop.feeds import Feed, LoopFeeds, LoopLoader, StepNumbers, reader_of
from midstride.engine.loop.frames import left_by_break, script_frames
from midstride.engine.loop.kept import Kept, KeptModules
from midstride.engine.loop.replay import LoopReplay
from midstride.engine.loop.script_job import LoopArguments, script_job
from midstride.engine.loop.state import KeptObjects, LoopObjects, LoopPosition, LoopState, addresses_in, loop_state
from midstride.engine.loop.variables import ScriptVariables, code_in_loop, outside_of_frames
from midstride.engine.loop.wrappers import continue_wrappers
from midstride.engine.metrics.logger import MetricLogger
from midstride.engine.metrics.torchmetrics_state import TorchmetricsState
from midstride.engine.modules.progress import Progress
from midstride.engine.processes.lifetime import tie_to_parent
from midstride.engine.ranks.devices import UNSET, DeviceRequest, Hardware
from midstride.engine.ranks.placement import resolve_placement
from midstride.engine.seeds import ensure_generators_free, reserved_generators, seed_everything
from midstride.engine.session.ending import Ending, EndReason
from midstride.engine.session.heartbeat import Heartbeat
from midstride.engine.session.replay_plan import ReplayPlan
from midstride.engine.session.requests import SignalRequests
from midstride.engine.session.script_exit import exit_codes_of_errors
from midstride.engine.state.row_shards import is_distributed
from midstride.engine.state.stateful import Stateful
from midstride.engine.strategies.base import Strategy
from midstride.engine.strategies.collective import Collective, SingleProcess
from midstride.engine.strategies.own_loop import OwnLoop
from midstride.engine.world import World

__all__ = ["Loop"]

log = logging.getLogger(__name__)

_DEFAULT = SnapshotOptions.model_validate({})


class Loop:
    """Exact resume for a training loop of your own: a restarted script continues where it died.

    Build it first of all, since it seeds the random number generators. Then build models, optimizers and loaders,
    name them by `keep` and `loader`, and iterate over `epochs` or `steps`.

    Args:
        run: folder or URL of the run; the same `run` again resumes it. The script of a job leaves it out.
        seed: seed of Python, numpy and torch, and of the order of samples, the same on all ranks; if None that of the
            job, or 0.
        snapshots: when to write the whole state, such as {"every_seconds": 60}.
        resume: "auto", "never" (start over in the same folder), or the step of a snapshot.
        take_over: take the run from another process that trains it now; else that is an error.
        accept_change: one or several keys of the run's identity that may differ from its snapshot, such as "seed".
        loggers: trackers that receive the metric log: "tensorboard", {"mlflow": {"tracking_uri": ...}}.
        deterministic: use only deterministic algorithms of torch.
        accelerator: "gpu", "cpu", or "auto" for a GPU if there is one.
        enable_progress_bar: show a progress bar on a terminal.

    Raises:
        JobError: arguments are wrong; the message names all faults.
    """

    #: whether each rank is seeded by its number if all would draw the same numbers
    seeds_apart = True

    def __init__(
        self,
        run: str | os.PathLike[str] | None = None,
        *,
        seed: int | None = None,
        snapshots: SnapshotOptions | Mapping[str, Any] = _DEFAULT,
        resume: Resume = "auto",
        take_over: bool = False,
        accept_change: str | Collection[str] = (),
        loggers: Sequence[str | Mapping[str, Any] | LoggerOptions] = (),
        deterministic: bool = True,
        accelerator: str = "auto",
        enable_progress_bar: bool = True,
    ) -> None:
        tie_to_parent()
        with exit_codes_of_errors():
            ensure_generators_free()  # before the Loop of another thread, which trains, would be closed
        _close_previous()
        self._progress, self._job, self._is_closed = Progress(), script_job(), True
        given = LoopArguments(
            run, seed, snapshots, accept_change, loggers, deterministic, accelerator, enable_progress_bar, take_over
        )
        with exit_codes_of_errors():
            if self._job is not None:
                self._job.follow(self._progress, self.close)
                given = self._job.arguments(given, _DEFAULT)
            self._run, self._settings, self._given = given.url, given.settings(), given
            gpus = UNSET if given.gpus is None else given.gpus
            request = DeviceRequest(accelerator=given.accelerator, gpus=gpus, auto_select_gpus=given.auto_select_gpus)
            placement, faults = resolve_placement(request, Hardware.here())
            if faults:
                raise JobError.of("Loop(...)", faults)
        self._resume: Resume = resume
        self._devices, self._summary = placement.strategy.devices, placement.summary
        #: the namespace whose attributes are part of snapshots
        self.state = LoopState()
        self._script = _script_object()
        self._kept, self._feeds, self._numbers = Kept(), list[Feed](), Feed("steps", StepNumbers())
        self._position, self._calls = LoopPosition(), 0
        self._iterator: Callable[[], Generator[Any, None, None] | None] = lambda: None
        self._attempt: Attempt | None = None
        self._collective: Collective | None = None
        self._is_closed, self._is_over, self._runs, self._is_stopped = False, False, False, False
        self._heartbeat, self._requests = Heartbeat.of(self._world), SignalRequests()
        self._reporter = Reporter(self._world, bar=given.enable_progress_bar)
        self._determinism = Determinism(given.deterministic, on=True)
        self._determinism.__enter__()
        atexit.register(self.close)
        if _has_drawn_unseeded():
            log.warning(
                "Loop is built after random numbers were drawn without a seed: weights that were built before differ "
                "in each new run. Build the Loop first of all, as it seeds the generators"
            )
        seed_everything(self._settings.seed)
        _NEWEST.append(self)

    # What the script tells before the loop -----------------------------------------------------------

    def keep(self, **named: Any) -> None:
        """Keep objects in snapshots: modules, optimizers, schedulers, scalers, your own.

        Args:
            named: the objects by name; the names have to be the same in every attempt.

        Raises:
            UserError: the loop has begun, or an object is kept already.
        """
        with exit_codes_of_errors():
            self._ensure_not_begun(f"keep({', '.join(named)})")
            for name, value in named.items():
                self._kept.add(name, value)

    def loader(self, loader: Any) -> LoopLoader:
        """Return `loader` as one that resumes; iterate over the result.

        Each rank reads its own share of the samples of a DataLoader. Each pass is an epoch of the order of
        `DistributedSampler`.

        Args:
            loader: a DataLoader, or anything else that the Trainer takes as one; see `docs/data.md`.
        """
        with exit_codes_of_errors():
            self._ensure_not_begun("loader(...)")
            if isinstance(loader, LoopLoader):
                raise UserError("loader(...): this loader is wrapped already. Wrap each loader once")
            number = len(self._feeds)
            settings = LoaderSettings(self._world, self._settings.options, self._settings.seed)
            reader = reader_of(loader, number, settings, self._ranks())
            self._feeds.append(Feed(str(number), reader))
            return LoopLoader(self._feeds[-1], self._read, loader)

    def ddp(self, module: nn.Module, **options: Any) -> nn.Module:
        """Return `module` on this rank's device; on several processes in DDP.

        Args:
            module: the module.
            options: arguments of `DistributedDataParallel`.
        """
        module = module.to(self.device)
        if self.world_size == 1:
            return module
        self._connect()
        return DistributedDataParallel(module, **options)

    def shard(self, module: nn.Module) -> nn.Module:
        """Shard the weights of `module` over the ranks, in place, and return it.

        Call it before building optimizers. Elements of the module's lists and sequences are gathered one by one, as by
        strategy `fully_sharded`.
        """
        if self.world_size == 1:
            return module.to(self.device)
        from midstride.engine.strategies.sharded import OwnShardedLoop  # its import takes seconds

        strategy = OwnShardedLoop(self._connect())
        strategy.attach(self._world, self._devices)
        strategy.shard(module)
        return module

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self._devices[0]

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return self._world.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._world.size

    # The loop ------------------------------------------------------------------------------------------

    def epochs(self, count: int) -> Iterator[int]:
        """Yield epoch numbers, from 0 or the snapshot's on; the first call restores the state.

        Args:
            count: number of epochs.
        """
        return self._remembered(self._epochs(count))

    def _epochs(self, count: int) -> Generator[int, None, None]:
        with (
            exit_codes_of_errors(),
            self._call(Ending(EndReason.MAX_EPOCHS, f"epochs({count}) is done"), count) as attempt,
        ):
            while attempt is not None and self._position.epoch < count and not self._is_stopped:
                attempt.begin_epoch()
                yield self._position.epoch
                attempt.end_epoch()

    def steps(self, loader: LoopLoader | int, count: int | None = None) -> Iterator[Any]:
        """Yield batches of `loader`, pass after pass, or the numbers of steps if there is no loader.

        Args:
            loader: one that `Loop.loader` returned; or, without a loader, the number of steps.
            count: number of steps.
        """
        with exit_codes_of_errors():
            feed, number = self._steps_asked(loader, count)
        return self._remembered(self._steps(feed, number))

    def _remembered(self, iterator: Generator[Any, None, None]) -> Generator[Any, None, None]:
        """Remember an iterator by a weak reference: it ends where the script drops it."""
        self._iterator = weakref.ref(iterator)
        return iterator

    def _steps(self, feed: Feed, count: int) -> Generator[Any, None, None]:
        with exit_codes_of_errors(), self._call(Ending(EndReason.MAX_STEPS, f"{count} steps are done")) as attempt:
            while attempt is not None and self._position.step < count:
                yield from attempt.steps(feed, count)

    def log(
        self,
        name: str,
        value: Any,
        *,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        prog_bar: bool = False,
        sync_dist: bool = False,
        reduce_fx: str = "mean",
        batch_size: int | None = None,
    ) -> None:
        """Log a number, or a tensor of one number, to `metrics.csv` and the trackers.

        Within a batch it is a value of the step, elsewhere one of the epoch.

        Args:
            name: such as "train/loss".
            value: the value to log.
            on_step: log the value of this batch; the default within a batch.
            on_epoch: log one value for the epoch; the default elsewhere.
            prog_bar: show the value in the progress bar.
            sync_dist: reduce the value over the ranks.
            reduce_fx: how the values of batches are reduced: mean (weighted by samples), sum, min or max.
            batch_size: samples in this batch; by default as `TrainingModule.log` counts them.
        """
        attempt = self._attempt
        if attempt is None or self._is_over:
            raise UserError(
                f"loop.log({name!r}) {'after' if self._is_over else 'before'} the loop: there is no row for it. Log "
                "within epochs() or steps()"
            )
        asked = (name, on_step, on_epoch, prog_bar, sync_dist, reduce_fx, True)
        if attempt.in_batch:
            attempt.context.metric_logger.log(asked, value, batch_size)
        else:
            attempt.log_of_epoch(asked, value, batch_size)

    def stop(self) -> None:
        """End `epochs` after the current epoch, as `break` would: the run is complete."""
        self._is_stopped = True

    def end_pass(self) -> None:
        """Count the current batch, after which the pass ends early."""
        if self._attempt is not None:
            self._attempt.end_pass()

    def save_weights(self, folder: Literal["best", "last"] = "best") -> None:
        """Write the weights of the kept modules to `folder` of the run.

        Every rank calls this at the same point.
        """
        if self._attempt is None:
            raise UserError(f"loop.save_weights({folder!r}) before the loop: call it within epochs() or steps()")
        self._attempt.checkpointer.save_weights(folder)

    # Parts -----------------------------------------------------------------------------------------------

    @contextmanager
    def _call(self, ending: Ending, epochs: int | None = None) -> Iterator[Attempt | None]:
        """Begin and end a call of `epochs` or `steps`; yield None if the snapshot is beyond it."""
        number, self._calls = self._calls, self._calls + 1
        self._ensure_may_begin()
        attempt = self._attempt or self._begin()
        if epochs is not None and not self._feeds:
            raise UserError(
                f"epochs({epochs}) without a loader of the loop: no snapshot could be taken. Write train = "
                "loop.loader(train) and iterate over it; or without a loader, for step in loop.steps(number)"
            )
        position = self._position
        if number < position.call or (number == position.call and position.ended == "break"):
            yield None
            return
        if number > position.call:
            attempt.begin_call(number)
        position.continue_call()
        continue_wrappers(self._iterator(), position.step if epochs is None else position.epoch)
        self._runs, self._is_over, self._is_stopped = True, False, False
        self._progress.begin_fit()
        store = self._ranks().key_value_store()
        with reserved_generators(), self._requests.listening(store, self._world, takes_snapshots=True):
            self._announce(attempt, epochs)
            try:
                yield attempt
            except GeneratorExit:
                if left_by_break():
                    self._finish(attempt, LEFT_BY_BREAK)
                raise
            self._finish(attempt, LEFT_BY_BREAK if self._is_stopped else ending)

    def _finish(self, attempt: Attempt, ending: Ending) -> None:
        attempt.finish(ending)
        self._runs, self._is_over = False, True

    def _ensure_may_begin(self) -> None:
        if self._is_closed:
            raise UserError(f"this Loop over {self._run} is closed, since another one was built. Use the newer one")
        if self._runs:
            raise UserError(
                f"the loop over {self._run} was left by an exception in the middle of a step, so its state in memory "
                "is incomplete. Build everything again, the Loop first: it resumes from the last snapshot"
            )

    def _ensure_not_begun(self, what: str) -> None:
        if self._attempt is not None:
            raise UserError(f"{what} was called after the loop had started and restored its state. Call it earlier")

    def _steps_asked(self, loader: LoopLoader | int, count: int | None) -> tuple[Feed, int]:
        if isinstance(loader, LoopLoader) and count is not None:
            return loader.feed, count
        if isinstance(loader, int) and count is None:
            return self._numbers, loader
        if isinstance(loader, DataLoader):
            raise UserError("steps(...) was given a DataLoader: wrap it first, as train = loop.loader(train)")
        raise UserError("steps(...) takes a loader of this loop and a number of steps, or a number of steps alone")

    def _read(self, feed: Feed) -> Generator[Any, None, None]:
        """Return an iterator over the next pass, or the rest of a snapshot's.

        The first iterator after the restore continues the pass of the snapshot.
        """
        reading = self._batches(feed, claimed=self._attempt is not None and feed.claim())
        next(reading)  # it is within its `try` then, where it notices that the script drops it before a batch
        return reading

    def _batches(self, feed: Feed, *, claimed: bool) -> Generator[Any, None, None]:
        """Yield None, then the batches of a pass; the first loader that trains in an epoch leads it."""
        try:
            yield
        except GeneratorExit:
            if claimed:
                feed.unclaim()
            raise
        attempt, continues = self._attempt, claimed or feed.claim()
        with exit_codes_of_errors():
            if attempt is not None and self._runs and attempt.may_lead(feed):
                yield from attempt.lead(feed, continues=continues)
                return
            feed.begin_pass(continues=continues)
            try:
                for batch in feed.batches():
                    if attempt is not None:
                        attempt.compare_data(feed, among_ranks=False)
                    yield batch
            finally:
                feed.end_pass()

    def _begin(self) -> Attempt:
        """Build the context and the state of the run, and restore it."""
        self._kept.check(self.state, addresses_in)
        ranks = self._connect()
        modules = KeptModules(self._kept.modules)
        if self._world.size > 1:
            self._kept.find_replicas()
        strategy = _strategy(ranks, self._kept, modules)
        strategy.attach(self._world, self._devices)
        metrics = TorchmetricsState(modules, ranks.gather, self._world.size)
        context = RunContext(
            settings=self._settings,
            strategy=strategy,
            device=self.device,
            heartbeat=self._heartbeat,
            reporter=self._reporter,
            requests=self._requests,
            faults=self._watcher(),
            metric_logger=MetricLogger(ranks.gather, metrics, self._world.size),
            progress=self._progress,
            finite_losses=FiniteLosses(self._progress, self._world.rank, needed=False),
        )
        feeds = LoopFeeds([*self._feeds, self._numbers])
        others = KeptObjects(self._kept.others)
        objects = LoopObjects(self._kept, modules, feeds, self.state, self._script, others)
        variables = ScriptVariables(objects, speaks=self._world.is_first)
        own: dict[str, Stateful] = {"position": self._position, "variables": variables}
        own |= {f"kept {name}": part for name, part in self._kept.parts.items()}
        state = loop_state(context, objects, own, outside_of_frames(objects), code_in_loop)
        attempt = Attempt(context, objects, self._position, variables, state, self._run)
        is_resumed = attempt.resume(self._resume, take_over=self._given.take_over, weights=self._given.weights)
        if self.seeds_apart and not is_resumed:
            attempt.seed_apart()
        if self._job is not None:
            self._job.begin()
            if self._job.is_trial:
                attempt.stop_after_batch()
        self._attempt = attempt
        return attempt

    def _watcher(self) -> PhaseWatcher | None:
        """Return the replay or the injected faults that the environment plans."""
        plan = ReplayPlan.from_environment()
        if plan is not None and self._job is not None:
            return LoopReplay(plan, lambda: self._attempt)
        return FaultPlan.from_environment()

    def _announce(self, attempt: Attempt, epochs: int | None) -> None:
        self._reporter.announce(self._summary)
        options = self._settings.options.model_copy(update={"max_epochs": epochs, "max_steps": None})
        batches = self._feeds[0].reader.estimated_batches if self._feeds else None
        self._reporter.begin(self._progress, batches, options, attempt.checkpointer.generation)

    def _connect(self) -> Collective:
        """Let the ranks meet; return their collective."""
        ranks = self._ranks()
        ranks.init_process_group(self._world, self.device)
        # At exit, functions run in reverse order: pending snapshots are committed before the ranks part.
        atexit.unregister(self.close)
        atexit.register(self.close)
        return ranks

    def _ranks(self) -> Collective:
        """Return the collective of the ranks; torch's is imported with several of them only."""
        if self._collective is None:
            if self._world.size == 1:
                self._collective = SingleProcess()
            else:
                from midstride.engine.strategies.torch_collective import TorchCollective

                self._collective = TorchCollective()
        return self._collective

    @property
    def _world(self) -> World:
        """The world described by a launcher, or that of the script's own process group."""
        world = World.from_environment()
        distributed = torch.distributed
        if world.size > 1 or not (distributed.is_available() and distributed.is_initialized()):
            return world
        size = distributed.get_world_size()
        return World(rank=distributed.get_rank(), size=size, local_size=size, local_rank=distributed.get_rank())

    def close(self) -> None:
        """Commit pending snapshots and release the run; at exit, and when another Loop is built."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        if self._calls == 0 and any(feed.was_read for feed in self._feeds):
            log.warning(
                "the script has read a loader of the loop outside of the loop, so nothing is saved: iterate over "
                "loop.epochs(number) "
                "or loop.steps(loader, number)"
            )
        with suppress(EngineError):
            if self._attempt is not None:
                self._attempt.checkpointer.close()
        self._reporter.close()
        self._determinism.__exit__(None, None, None)


#: the newest Loop of this process
_NEWEST: list[Loop] = []


def _close_previous() -> None:
    """Close the previous Loop of this process, such as that of the same notebook cell."""
    for previous in _NEWEST:
        previous.close()
    _NEWEST.clear()


def _strategy(ranks: Collective, kept: Kept, modules: KeptModules) -> Strategy:
    """Return the strategy that describes how the script trains `modules`."""
    if any(is_distributed(parameter) for parameter in modules.parameters()):
        from midstride.engine.strategies.sharded import OwnShardedLoop  # its import takes seconds

        return OwnShardedLoop(ranks, modules)
    return OwnLoop(ranks, kept.replicated, kept.modules)


def _has_drawn_unseeded() -> bool:
    """Return whether torch's generator has drawn numbers from a seed of torch's own choice."""
    seed = torch.initial_seed()
    return seed >= 1 << 32 and not torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(seed).get_state())


def _script_object() -> object:
    """Return an object of a class that stands for the module of the script that builds a Loop."""
    frame = next(script_frames())
    return type("Script", (), {"__module__": frame.f_globals.get("__name__", "__main__")})()
