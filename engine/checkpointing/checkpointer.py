"""Checkpointer: takes a run's snapshots and resumes from them.

It knows parts of a state, and no module.
"""

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any, Literal

import torch

from midstride.engine.checkpointing.context import RunContext
from midstride.engine.checkpointing.identity import (
    check_environment,
    check_identity,
    check_recorded,
    environment_changes,
)
from midstride.engine.checkpointing.rank_warnings import RankWarnings
from midstride.engine.checkpointing.replica_check import ReplicaCheck
from midstride.engine.checkpointing.restore_check import check_restores
from midstride.engine.checkpointing.run_state import RunState, facts_of
from midstride.engine.checkpointing.run_store import GRACE_S, Resume, RunStore
from midstride.engine.checkpointing.text_order import text_order_facts, text_order_warnings
from midstride.engine.checkpointing.unsaved_state import DataChanges, UnsavedStateMonitor
from midstride.engine.checkpointing.world_size import (
    InitialSharding,
    check_fixed_world,
    padding_change,
    reshard,
    resize_loaders,
)
from midstride.engine.config.options import SnapshotOptions
from midstride.engine.errors import EngineError, StopRequested, StoreSilent, UnsupportedState
from midstride.engine.loggers.logger_processes import LoggerProcesses
from midstride.engine.objects.constants import constant_changes, constants_of
from midstride.engine.objects.object_state import Objects
from midstride.engine.processes.preload import collector_paused
from midstride.engine.session.heartbeat import Phase
from midstride.engine.session.replay_plan import ReplayPlan
from midstride.engine.session.requests import Request, RequestKind
from midstride.engine.snapshots.catalog import Snapshot
from midstride.engine.snapshots.position import Position
from midstride.engine.snapshots.row_times import RowTimes
from midstride.engine.snapshots.schedule import SnapshotSchedule
from midstride.engine.snapshots.writer import PendingSnapshot
from midstride.engine.state.codec import encode_lazily
from midstride.engine.state.stateful import Reshardable, restore_parts, state_of
from midstride.engine.strategies.mixins import Measures

__all__ = ["Checkpointer"]

log = logging.getLogger(__name__)

#: number of first batches of an attempt whose reading is watched for changes
_READS = 1
_END: Any = object()


class Checkpointer:
    """Takes the snapshots of one attempt of a run, and resumes from them.

    Args:
        context: context of the run.
        state: state of the run, as this attempt builds it.
        url: folder or fsspec URL of the run.
        options: when snapshots are taken.
    """

    def __init__(self, context: RunContext, state: RunState, url: str, options: SnapshotOptions) -> None:
        self._context, self._state = context, state
        store_options = replace(options.store_options, on_wait=context.reporter.store_waits)
        archive = options.archive_every_steps
        self.run = RunStore(url, context.strategy, options.keep, context.heartbeat, store_options, archive)
        self._schedule = SnapshotSchedule(options, context.collective.gather, lambda: self.run.is_writing)
        self._warnings = RankWarnings(context.world, context.collective.gather)
        #: name -> part of the state: everything that decides how the run continues
        self.parts = state.parts
        self._unsaved_state: UnsavedStateMonitor | None = None
        self._data_changes, self._is_due = DataChanges(context, state.loaders.read_in_epoch), False
        self._conditions: list[Callable[[], bool]] = []
        self._end_hooks: Callable[[], None] | None = None
        self._taken_at: dict[str, Any] = {}  # progress at the newest snapshot
        self._replica_check = ReplicaCheck(context.strategy, context.collective.gather)
        self._has_watched_hooks, self._reads_to_watch = False, _READS
        self._is_verified = False  # whether `check_restores` has run after the first step, or need not
        self._initial_sharding = InitialSharding.of(state.loaders, context.world.size)
        self._facts = facts_of(state.facts, context.device)
        self._weights: dict[str, str] = {}  # folder -> name of the newest weights
        self._weights_facts: dict[str, dict[str, Any]] = {}  # folder -> facts of the newest weights
        self._loggers: LoggerProcesses | None = None
        self._row_times = RowTimes()
        self._resumed_from: Snapshot | None = None
        self._trusted_step = 0  # the last step whose two executions were equal
        self._write_s = 0.0  # seconds that the last snapshot took until it was committed

    @staticmethod
    def try_encoding(state: RunState) -> None:
        """Raise the errors of a snapshot of `state`: parts that cannot be written or restored."""
        with collector_paused(), state.reading():
            encode_lazily(state_of(state.parts))
        check_restores(state.parts, "before the first step", state.reading)

    def resume(self, resume: Resume, *, take_over: bool = True) -> bool:
        """Restore the newest good snapshot, or that named by `resume`; return whether there is one.

        Raises:
            RunHeld: another process advances the run, and it is not to be taken over.
        """
        if not take_over:
            self.run.ensure_free(self._context.reporter.announce)
        with self._warnings.merge_ranks():
            return self._resume(resume)

    def _resume(self, resume: Resume) -> bool:
        plan = ReplayPlan.from_environment()
        if plan is not None and plan.recorded is not None:
            check_recorded(plan.recorded, self._facts["bits"])
        found = self.run.resume(resume, self._merged, lambda phase: self._context.inject_fault(phase, 0))
        if found is not None:
            self._restore(*found)
            self._resumed_from = found[0]
        else:
            self.try_encoding(self._state)  # raises now, rather than at the first snapshot
        self._row_times.note(self._context.progress.step, time.time())
        self._is_verified = found is not None
        self._unsaved_state = UnsavedStateMonitor(self._state.watched, self._state.way_to_keep, self._state.places)
        facts = found[0].manifest["facts"] if found else {}
        self._warn_of_text_order(facts)
        self._facts["constants"] = constants_of(self._state.code(), self._state.places)
        self._warn(constant_changes(facts.get("constants", {}), self._facts["constants"]))
        self._begin_generation(found[0] if found else None)
        return found is not None

    def restore_again(self) -> None:
        """Restore the snapshot of `resume` once more, except for the strategy.

        User code may have changed the state since.
        """
        assert self._resumed_from is not None
        saved = self._resharded(self._resumed_from, self.run.trees_of(self._resumed_from, self._merged))
        again = [name for name in self.parts if name != "strategy"]  # its sums are replayed once
        restore_parts({name: self.parts[name] for name in again}, {name: saved[name] for name in again})
        self._state.loaders.restored()

    def _restore(self, snapshot: Snapshot, trees: list[dict[str, Any]]) -> None:
        """Restore every part of the run from `trees`, as `RunStore.resume` returns them.

        Raises:
            UserError: the snapshot is of another run, or cannot be resumed by this world.
            ReadBackDiffers: the restored state of a part differs from the saved one.
        """
        facts = snapshot.manifest["facts"]
        where = f"{self.run.store.url}/snapshots/{snapshot.name}"
        self._resize_loaders(snapshot, trees[0], where)
        self._check(snapshot.manifest, where)
        self._state.settings.check(facts, where)
        saved = self._resharded(snapshot, trees)
        if facts["identity"].get("strategy") != self._facts["identity"].get("strategy"):  # an accepted change
            saved = {**saved, "strategy": self.parts["strategy"].state_dict()}
        restore_parts(self.parts, saved)
        self._state.loaders.restored()
        self._row_times = RowTimes(facts.get("row_times", ()))
        self._taken_at = self._context.progress.state_dict()
        self._weights = dict(facts.get("weights", {}))
        self._weights_facts = dict(facts.get("weights_facts", {}))
        self._warn(self._state.settings.compare(facts, self._facts))
        logged = self._context.metric_logger
        logged.hparams.update({**facts.get("hparams", {}), **logged.hparams})

    def _begin_generation(self, resumed_from: Snapshot | None) -> None:
        """Acquire the next lease of the run, write `run.json`, and start the processes of loggers."""
        lease = self.run.begin(resumed_from)
        self._report_resume(lease.generation, lease.resumed_from)
        loggers = self._context.settings.loggers
        dumped = {"loggers": [options.model_dump(mode="json") for options in loggers]} if loggers else {}
        facts = {**self._facts, **self._state.settings.facts(), **self._state.facts.hyperparameters(), **dumped}
        self.run.write("run.json", json.dumps({"run": self.run.name, **facts}, indent=2))
        if loggers and self._context.world.is_first:
            self._loggers = LoggerProcesses(loggers, self.run.store, lease.generation)

    @property
    def generation(self) -> int | None:
        """Number of this attempt of the run, from 1; None before it has a lease."""
        return self.run.lease.generation if self.run.lease is not None else None

    def snapshot_if_due(self) -> None:
        """Take a snapshot if one is due; raises errors of the writing thread."""
        self.run.check()
        progress = self._context.progress
        if not self._is_verified:
            self._is_verified = True
            with self._warnings.merge_ranks():
                check_restores(self.parts, "after the first step", self._state.reading)
        self._is_due |= self._schedule.is_due(progress.val_batch if progress.validating else progress.step)
        if self._is_due and self._is_complete() and self._data_changes.allow_snapshot():
            self.take()

    def take_only_if(self, condition: Callable[[], bool]) -> None:
        """Take no snapshot while `condition` returns False; all ranks call it at the same boundary."""
        self._conditions.append(condition)

    def snapshot_before(self, boundaries: int, seconds: float) -> None:
        """Take a snapshot if one is due within `boundaries` that take `seconds` and allow none."""
        progress = self._context.progress
        if self._taken_at == progress.state_dict() or not self._schedule.falls_due_within(boundaries, seconds):
            return
        if self._data_changes.allow_snapshot():
            if (progress.step, progress.after) == (self._taken_at.get("step"), self._taken_at.get("after")):
                progress.boundary_passed()  # so that it has a name of its own
            self.take()

    def _is_complete(self) -> bool:
        """Return whether this state is the run's; every rank calls this at the same boundary."""
        return all(condition() for condition in self._conditions)

    def postpone(self) -> None:
        """Move a due snapshot to the next boundary, as a run could not resume from this one."""
        self._is_due |= self._schedule.is_due(self._context.progress.step)

    def handle(self, request: Request) -> None:
        """Take the requested snapshot, if there is time; every rank calls this at the same boundary.

        Raises:
            StopRequested: the request was to stop. The message names the snapshot from which a retry resumes.
        """
        run = self.run
        everyone = self._context.collective.gather((request.left_s, self._write_s))
        left_s, write_s = min(left for left, _ in everyone), max(took for _, took in everyone)
        if left_s > write_s:
            if not self._is_complete():
                self._is_due = True  # where it is again
            elif self._data_changes.allow_snapshot():
                self.take()
            else:
                self._warn(["no snapshot is taken here: the data have changed since the epoch began"])
            run.flush()
        elif self._context.world.is_first:
            log.warning(
                "no snapshot is taken: the last one took %.1f s, %.1f s remain before the process is killed",
                write_s,
                left_s,
            )
        if request.kind is RequestKind.STOP:
            raise StopRequested(f"asked to stop, after step {self._context.progress.step}; {run.resume_message()}")

    def take(self, rows: Callable[[], str] | None = None) -> None:
        """Take a snapshot now, committed by a thread during training.

        Every rank calls this at the same point.

        Args:
            rows: returns the rows of the metric log once the state is copied; by default they are those until now.
        """
        context, progress = self._context, self._context.progress
        context.finite_losses.verify()
        self._is_due = False
        began = time.perf_counter()
        self._row_times.note(progress.step, time.time())
        position, epoch, self._taken_at = Position(progress.step, progress.after), progress.epoch, progress.state_dict()

        def probe(phase: str) -> None:
            context.inject_fault(phase, position.step)

        def committed(pending: PendingSnapshot, snapshot: Snapshot) -> None:
            self._write_s = pending.stall_s + pending.write_s
            if self._loggers is not None:
                self._loggers.wake()
            durations = {"stall_s": pending.stall_s, "wait_s": pending.wait_s, "write_s": pending.write_s}
            context.reporter.emit(
                "snapshot", name=snapshot.name, step=position.step, epoch=epoch, bytes=snapshot.bytes, **durations
            )

        def rows_after_copy() -> str:
            found = rows() if rows is not None else ""
            facts.update(self._state.facts.hyperparameters(), weights=dict(self._weights))  # a hook may have added some
            return found

        written = context.metric_logger.drain_rows() if rows is None else rows_after_copy
        self._state.samples.merge_ranks(context.collective.gather)
        facts = self._snapshot_facts()
        with self._warnings.merge_ranks():
            if self._unsaved_state is not None:
                self._unsaved_state.check(epoch)
            with self._watching_hooks(), collector_paused(), self._state.reading():
                state = state_of(self.parts)
        self._replica_check.check(state)
        self.run.snapshot(position, state, written, facts, probe, committed)
        self._schedule.reset(time.perf_counter() - began)

    def _snapshot_facts(self) -> dict[str, Any]:
        progress, strategy = self._context.progress, self._context.strategy
        are_last = progress.finished and self._end_hooks is None
        return {
            **self._facts,
            **self._state.settings.facts(),
            **self._state.facts.hyperparameters(),
            "start": self._initial_sharding.to_json(),
            "strategy": strategy.measurements() if isinstance(strategy, Measures) else {},
            "progress": progress.state_dict(),
            "left_out": list(self._state.samples.left_out),
            "row_times": self._row_times.anchors,
            "weights": dict(self._weights),
            "weights_facts": {
                **self._weights_facts,
                **({"last": self._state.facts.of_weights()} if are_last else {}),
            },
        }

    def _watching_hooks(self) -> AbstractContextManager[None]:
        """Watch the hooks of the first snapshot of this attempt."""
        changes, is_first = self._state.hook_changes, not self._has_watched_hooks
        self._has_watched_hooks = True
        return changes.watching() if changes is not None and is_first else nullcontext()

    def watched_reads(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return `batches`; note the changes made by reading the first of them."""
        return chain(self._first_reads(batches), batches)

    def _first_reads(self, batches: Iterator[Any]) -> Iterator[Any]:
        while self._reads_to_watch:
            self._reads_to_watch -= 1
            with self._reading():
                batch = next(batches, _END)
            if batch is _END:
                return
            yield batch

    @contextmanager
    def _reading(self) -> Iterator[None]:
        objects, unsaved = self.parts["objects"], self._unsaved_state
        with ExitStack() as stack:
            if unsaved is not None:
                stack.enter_context(unsaved.reading())
            if isinstance(objects, Objects):
                stack.enter_context(objects.reading())
            yield
        if isinstance(objects, Objects):
            objects.leave_out_flags(unsaved.changed_by_reading() if unsaved is not None else ())

    def finish(self, end_hooks: Callable[[], None] | None = None) -> None:
        """Commit the end of the run, with the last weights and the whole metric log.

        The last snapshot is of the state before `end_hooks`, which may change the structure of the module. The last
        weights are those after them.

        Args:
            end_hooks: calls the hooks at the end of training, if there are any; their logged values join the last row.

        Raises:
            StoreSilent: the store did not answer; a retry resumes from the last snapshot in it.
        """
        context, rows, self._end_hooks = self._context, self._context.metric_logger.rows, end_hooks

        def last_rows() -> str:
            if end_hooks is not None:
                rows.reopen()
                end_hooks()
                rows.close()
            return context.metric_logger.drain_rows()

        try:
            if not rows.is_closed:
                context.progress.boundary_passed()  # there may be a snapshot of the last one already
                rows.close()
                self.take(last_rows)
            elif end_hooks is not None:  # an earlier attempt has taken the last snapshot
                end_hooks()
            self.run.flush()
            self._save_last_weights()
            self.run.flush_weights()
            self.run.verify_best()
            self.run.assemble_metric_log()
            if self._loggers is not None:
                with context.heartbeat.during(Phase.WAITING):
                    self._loggers.finish()
        except StoreSilent as error:
            raise StoreSilent(
                f"{error}\nThe training is over, after step {context.progress.step}, but its end could not be written: "
                f"{self.run.resume_message()}, and a retry ends with the same bits."
            ) from error

    def trust(self, step: int) -> None:
        """Note that two executions of `step` were equal: the newest snapshot up to it stays."""
        self._trusted_step = step
        self.run.trust(step)

    def distrust(self) -> str:
        """Set snapshots since the last verified step aside; return the one to resume from as text.

        Every rank calls this at the same point.
        """
        return self.run.distrust(self._trusted_step)

    def cause_of(self, error: Exception) -> Exception:
        """Return the writing thread's error if `error`, such as another rank's end, follows from it."""
        failure = self.run.close()
        return failure if isinstance(failure, EngineError) and not isinstance(error, EngineError) else error

    def close(self, *, at_once: bool = False) -> None:
        """Commit pending snapshots, unless `at_once`; end the writing thread and the loggers."""
        self.run.close(0.0 if at_once else GRACE_S)
        if self._loggers is not None:
            self._loggers.close()

    def save_weights(self, folder: Literal["best", "last"]) -> None:
        """Copy the weights; a thread writes them to `folder` while training continues."""
        self._save(folder, self._context.metric_logger.metrics.without_states(self._state.weights()))

    def _save(self, folder: str, weights: dict[str, Any]) -> None:
        progress, facts = self._context.progress, self._state.facts.of_weights()
        name = self.run.save_weights(folder, Position(progress.step, progress.after), weights, facts)
        if name:
            self._weights[folder], self._weights_facts[folder] = name, facts

    def _save_last_weights(self) -> None:
        """Save the final weights; if no file can hold them, as quantized ones, the last snapshot's."""
        try:
            self.save_weights("last")
        except UnsupportedState as error:
            if self._end_hooks is None:
                raise
            log.warning(
                "`last` holds the weights from before on_train_end: those after it cannot be written: %s", error
            )
            self._save("last", self.run.newest_weights())

    def _resize_loaders(self, snapshot: Snapshot, tree: dict[str, Any], where: str) -> None:
        """Divide the global batches over the ranks of this world."""
        facts, was = snapshot.manifest["facts"], snapshot.manifest["world_size"]
        self._initial_sharding = InitialSharding.from_json(facts["start"])
        size = self._context.world.size
        validating = facts["progress"]["validating"]
        if self._context.lanes is not None:
            # Lanes do not depend on the number of ranks, but the number of threads that launchers set may differ.
            torch.set_num_threads(facts["bits"]["threads"])
            self._facts = facts_of(self._state.facts, self._context.device)
            return
        if was == size == self._initial_sharding.size and not validating:
            return
        if was != size:
            check_fixed_world(self._context.strategy, was, size, where)
            # From its state, the loader may know why its batches cannot be divided by another number of ranks.
            self._state.loaders.training.load_state_dict(tree["feeds"]["training"])
        resize_loaders(
            self._state.loaders, self._initial_sharding, was=was, size=size, validating=validating, where=where
        )
        self._facts = facts_of(self._state.facts, self._context.device)

    @property
    def _merged(self) -> list[str]:
        """The parts whose states of all old ranks are merged in a world of another size."""
        return [name for name, part in self.parts.items() if isinstance(part, Reshardable)]

    def _resharded(self, snapshot: Snapshot, trees: list[dict[str, Any]]) -> dict[str, Any]:
        """Return this rank's tree, merged from all trees of a snapshot with other ranks."""
        world = self._context.world
        return trees[0] if snapshot.manifest["world_size"] == world.size else reshard(self.parts, trees, world.rank)

    def _check(self, manifest: dict[str, Any], where: str) -> None:
        saved, world = manifest["facts"], self._context.world
        accepted = self._context.settings.accept_change
        check_identity(saved["identity"], self._facts["identity"], where=where, accepted=accepted)
        if self._context.lanes is not None:
            check_environment(saved["bits"], self._facts["bits"], where=where, accepted=accepted)
        elif (was := manifest["world_size"]) != world.size:
            self._warn([_other_world(world.size, was)])
            samples = saved["identity"].get("samples")
            if samples is not None and (change := padding_change(samples, was, world.size)) is not None:
                self._warn([change])
        self._warn(environment_changes(saved["bits"], self._facts["bits"]))

    def _warn_of_text_order(self, saved: Mapping[str, Any]) -> None:
        everyone = self._context.collective.gather(text_order_facts())
        self._warn(text_order_warnings(self._state.facts.classes(), saved, everyone))

    def _warn(self, lines: Iterable[str]) -> None:
        if self._context.world.is_first:
            for line in lines:
                log.warning("%s", line)

    def _report_resume(self, generation: int, resumed_from: str | None) -> None:
        if resumed_from is not None:
            self._context.reporter.resumed(generation, resumed_from, self._context.progress.step)


def _other_world(size: int, was: int) -> str:
    return (
        f"{size} ranks were {was}: the same samples in the same batches, but sums may differ in their last bits from "
        "here on"
    )
