"""One attempt of a loop: restores the state, then follows batches and epochs."""

import logging
from collections.abc import Iterator
from typing import Any, Literal

import torch

from midstride.engine.checkpointing.boundary import StepBoundary
from midstride.engine.checkpointing.checkpointer import Checkpointer
from midstride.engine.checkpointing.context import RunContext
from midstride.engine.checkpointing.run_state import RunState
from midstride.engine.checkpointing.run_store import Resume
from midstride.engine.checkpointing.step_trace import StepTrace
from midstride.engine.data.data_check import ensure_same_data
from midstride.engine.errors import JobError, NotExact, SnapshotDamaged, SnapshotMissing
from midstride.engine.loop.feeds import Feed
from midstride.engine.loop.frames import left_by_break
from midstride.engine.loop.state import LoopObjects, LoopPosition
from midstride.engine.loop.variables import ScriptVariables, VariableWatch
from midstride.engine.loop.wrappers import continue_wrappers
from midstride.engine.metrics.logger import LogRequest
from midstride.engine.modules.quantized import load_weights
from midstride.engine.objects.object_state import Objects
from midstride.engine.seeds import Generators, rank_seed, seed_everything
from midstride.engine.session.ending import Ending, EndReason
from midstride.engine.session.heartbeat import Phase
from midstride.engine.snapshots.reader import weights_at
from midstride.engine.state.differences import differences
from midstride.engine.strategies.mixins import ModelParallel
from midstride.engine.trees import samples_in

__all__ = ["LEFT_BY_BREAK", "Attempt"]

log = logging.getLogger(__name__)

LEFT_BY_BREAK = Ending(EndReason.CALLBACK, "the script left the loop by break")


class Attempt:
    """One attempt of a loop.

    Args:
        context: context of the run.
        objects: objects of the loop.
        position: position of the loop.
        variables: variables of the script.
        state: state of the run, made of these.
        run: folder or URL of the run.
    """

    def __init__(
        self,
        context: RunContext,
        objects: LoopObjects,
        position: LoopPosition,
        variables: ScriptVariables,
        state: RunState,
        run: str,
    ) -> None:
        snapshots = context.settings.snapshots
        assert snapshots is not None  # a Loop without them is refused
        self.context, self.position = context, position
        self.progress, self._metric_logger, self._samples = context.progress, context.metric_logger, state.samples
        self.checkpointer = Checkpointer(context, state, run, snapshots)
        self._boundary = StepBoundary(context, self.checkpointer)
        self._objects, self._heartbeat = objects, context.heartbeat
        graph = state.parts["objects"]
        assert isinstance(graph, Objects)
        self._variables, self._watch = variables, VariableWatch(variables, graph.places)
        self._on_fetch, self._on_batch = context.faults_at("fetch"), context.faults_at("batch")
        #: the loader that leads the running epoch; None before it was asked for a batch, and after its pass
        self._leader: Feed | None = None
        #: whether a pass of this epoch was led to its end, or left
        self._was_led = False
        self._has_led = False
        self._has_named_epochs = False  #: whether an epoch without a leader was named
        self._compared: list[Feed] = []  #: loaders whose samples were compared
        #: whether the script is at work on a batch of the leader
        self.in_batch = False
        #: whether the state has to be restored once more, where the pass of the snapshot goes on
        self._restores_again = False
        self._is_trial = False
        #: names of the values that were logged in this epoch outside of batches
        self._logged_in_epoch: list[str] = []

    def stop_after_batch(self) -> None:
        """Ask for a stop at the first batch of this attempt, which tries a script."""
        self._is_trial = True

    def resume(self, resume: Resume, *, take_over: bool, weights: str | None) -> bool:
        """Restore the newest good snapshot, or that of `resume`; return whether there is one.

        Without one, load `weights`.

        Raises:
            JobError: the weights do not fit.
        """
        if isinstance(strategy := self.context.strategy, ModelParallel):
            self.checkpointer.take_only_if(strategy.can_save)
        if not self.checkpointer.resume(resume, take_over=take_over):
            if weights is not None:
                self._load(weights)
            return False
        self._check_kept()
        self._restores_again = self.progress.in_epoch and bool(self.position.lead)
        return True

    def _load(self, weights: str) -> None:
        try:
            load_weights(self._objects.modules, weights_at(weights).state_dict)
        except (SnapshotDamaged, SnapshotMissing, RuntimeError) as error:
            raise JobError(f"weights: those of {weights} do not fit the kept modules: {error}") from error

    def _check_kept(self) -> None:
        """Check that kept objects are the ones that the script has.

        Raises:
            NotExact: one could not be restored in place.
        """
        for name, value in self._objects.kept.others.items():
            if vars(self._objects.others).get(name) is not value:
                raise NotExact(
                    f"keep({name}=...): a {type(value).__name__} cannot be restored in place, and the script would use "
                    f"its new one. Write loop.state.{name} = ..., and use it as loop.state.{name}"
                )

    def seed_apart(self) -> None:
        """Seed each rank by its number if all would draw the same numbers."""
        if self.context.world.size == 1:
            return
        drawn = self.context.collective.gather(Generators().state_dict())
        if all(not differences(drawn[0], other) for other in drawn[1:]):
            seed_everything(rank_seed(self.context.settings.seed, self.context.world.rank))

    # Passes -----------------------------------------------------------------------------------------

    def may_lead(self, feed: Feed) -> bool:
        """Return whether the boundaries of this epoch are at the batches of `feed`."""
        is_free = self._leader is None and not self._was_led and torch.is_grad_enabled()
        return self.progress.in_epoch and is_free and self.position.lead in ("", feed.name)

    def lead(self, feed: Feed, *, continues: bool, until: int | None = None) -> Iterator[Any]:
        """Yield the batches of a pass; each request for the next one is a boundary.

        Args:
            feed: the loader.
            continues: whether it is the pass of a snapshot.
            until: steps of this call after which it ends early; None for no limit.
        """
        if self._restores_again:
            self._restore_again()
        self._variables.compare()
        self._watch.begin("pass")
        feed.begin_pass(continues=continues)
        if until is None and (continues or not self._has_led):  # the search takes some hundredths of a second
            continue_wrappers(feed.iterator, feed.batch)
            self._has_led = True
        self._leader, heartbeat = feed, self._heartbeat
        batches = self.checkpointer.watched_reads(feed.batches())
        try:
            while True:
                for fault in self._on_fetch:
                    fault()
                heartbeat.begin_work()
                batch = next(batches, self)
                heartbeat.end_work(batches=1)
                if batch is self:
                    return
                self._begin_batch(feed, batch)
                yield batch
                self._end_batch(feed)
                self._watch.look("pass")
                if feed.at_end and until is None and self._variables.are_read_after():
                    self.checkpointer.postpone()
                else:
                    self._boundary.after_batch()
                if feed.at_end or self.position.step == until:
                    return
        finally:
            self._leave(feed)

    def _restore_again(self) -> None:
        """Undo the script's changes since the restore, from the start of the epoch to this pass."""
        self._restores_again = False
        continues = {feed: feed.continues for feed in self._objects.feeds.feeds}
        self.checkpointer.restore_again()
        for feed, was in continues.items():
            feed.set_continues(was)

    def _begin_batch(self, feed: Feed, batch: Any) -> None:
        if feed.batch == 1 and (planned := feed.reader.planned_indices()) is not None:
            self._samples.plan(self.progress.epoch, planned)
        self.compare_data(feed, among_ranks=True)
        self._metric_logger.begin_batch(batch, feed.reader.weight)
        self._count = feed.reader.last_samples or samples_in(batch)
        self.in_batch = True
        for watch in self._on_batch:
            watch(feed.reader.last_indices, batch)
        if self._is_trial:
            self.context.requests.stop()

    def compare_data(self, feed: Feed, *, among_ranks: bool) -> None:
        """Compare samples with those of an earlier attempt, once for each loader.

        Args:
            feed: the loader, which has read one batch.
            among_ranks: whether all ranks read it now, and compare their data.
        """
        if feed in self._compared:
            return
        self._compared.append(feed)
        mine, context = [*feed.reader.data_digests()], self.context
        everyone = context.collective.gather(mine) if among_ranks else [mine]
        accepts_change = "samples" in context.settings.accept_change
        if ensure_same_data(everyone, accepts_change=accepts_change, warns=context.world.is_first):
            feed.reader.accept_data()

    def _end_batch(self, feed: Feed) -> None:
        """Count the batch and write its row."""
        self.in_batch = False
        progress, position, reader = self.progress, self.position, feed.reader
        position.follow(feed.name)
        self._samples.record(progress.epoch, progress.batch, reader.last_indices, self._count, None, reader.last_mark)
        if feed.at_end and (digest := reader.read_digest()) is not None:
            self._samples.note_read(progress.epoch, progress.batch + 1, digest, stateful=reader.had_states)
        progress.batch_done(at_end=feed.at_end, stepped=True)
        position.step_done()
        self._boundary.write_row(reader.estimated_batches)

    def trace(self) -> StepTrace:
        """Return an empty trace of the kept modules and optimizers."""
        objects = self._objects
        return StepTrace(objects.modules, [*objects.kept.optimizers.values()], self.context.device)

    def end_pass(self) -> None:
        """Count the current batch, after which the leader's pass ends early."""
        if self.in_batch and self._leader is not None:
            self._end_batch(self._leader)

    def _leave(self, feed: Feed) -> None:
        """End the pass: the batch that the script has left by `break` counts as done."""
        if self.in_batch and (self.position.lead == feed.name or left_by_break()):
            self._end_batch(feed)
        self.in_batch, self._leader = False, None
        self._was_led = self.position.lead == feed.name
        feed.end_pass()

    # Epochs and calls ---------------------------------------------------------------------------------

    def begin_epoch(self) -> None:
        """Begin an epoch, or continue that of a snapshot."""
        if not self.progress.in_epoch:
            self.progress.begin_epoch()
            self._watch.look("epochs")
            # Between the batches of a pass, a snapshot could not tell whether the script goes on with the pass.
            if not any(feed.is_running for feed in self._objects.feeds.feeds):
                self._boundary.between_steps()

    def end_epoch(self) -> None:
        """Reduce the values logged in the epoch, and count it.

        Raises:
            NotExact: the snapshot is from the middle of a pass that this attempt did not read.
        """
        if self._restores_again:
            raise NotExact(
                f"the snapshot is at batch {self.progress.batch} of loader {self.position.lead}, and this attempt "
                "has ended the epoch without reading it. Read the same loaders as before, or use another run name"
            )
        self._variables.forget()
        if not (self._has_led or self.progress.batch or self._has_named_epochs):
            self._has_named_epochs = True
            if self.context.world.is_first:
                log.warning(
                    "epoch %d has ended, and no loader of the loop was read in it with gradients: no snapshot was "
                    "taken. Iterate over the result of loop.loader(...)",
                    self.progress.epoch,
                )
        self._leader, self._was_led = None, False
        if self.progress.batch and not self.progress.at_end:
            self._samples.break_off(self.progress.epoch)
        with self._heartbeat.during(Phase.EVALUATING):
            self.context.inject_fault("epoch_end")
            self._metric_logger.close_epoch()
        self._report_epoch()
        self.progress.next_epoch()
        self.position.epoch_done()

    def begin_call(self, number: int) -> None:
        """Begin call `number` of `epochs` or `steps`; the one before may have left an epoch open."""
        if self.progress.in_epoch:
            self.end_epoch()
        self.position.begin_call(number)

    def steps(self, feed: Feed, count: int) -> Iterator[Any]:
        """Yield batches of `feed` until its pass ends or this call has `count` steps."""
        progress, self._restores_again = self.progress, False  # no code of the script runs before the first batch
        if progress.at_end:
            feed.claim()
            self.end_epoch()
        is_within = progress.in_epoch and self.position.lead == feed.name
        self.begin_epoch()
        yield from self.lead(feed, continues=feed.claim() or is_within, until=count)

    def log_of_epoch(self, asked: LogRequest, value: Any, batch_size: int | None) -> None:
        """Log a value outside of a batch; `asked` as of `MetricLogger.log`."""
        self._logged_in_epoch.append(asked[0])
        with self._metric_logger.epoch_hook():
            self._metric_logger.log(asked, value, batch_size)

    def _report_epoch(self) -> None:
        """Report the values that were logged outside of batches, such as those of a validation."""
        names, self._logged_in_epoch = dict.fromkeys(self._logged_in_epoch), []
        values = {name: float(self._metric_logger.values[name]) for name in names if name in self._metric_logger.values}
        if values:
            at = {"step": self.progress.step, "epoch": self.progress.epoch}
            self.context.reporter.emit("validation", **at, metrics=values)

    def finish(self, ending: Ending) -> None:
        """Commit the end of a call, with the last weights and the whole metric log."""
        how: Literal["end", "break"] = "break" if ending is LEFT_BY_BREAK else "end"
        self.in_batch = False
        self.position.end_call(how)
        self.progress.end_fit(ending)
        with self._heartbeat.during(Phase.EVALUATING):
            if how == "break":
                self._metric_logger.close_epoch()
            self.checkpointer.finish()
        at = {"step": self.progress.step, "epoch": self.progress.epoch}
        self.context.reporter.emit("finished", **at, ended_by=ending.reason.value, why=ending.sentence)
