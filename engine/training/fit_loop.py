"""The loop of a fit: epochs of batches, with validation in between.

Between two batches, the state parts of the context hold all state of the fit. So a fit can resume from a snapshot taken
between any two batches, of training or of a validation.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from midstride.engine.checkpointing.boundary import StepBoundary
from midstride.engine.checkpointing.checkpointer import Checkpointer
from midstride.engine.data.bad_samples import ON_REQUEST, NoSampleLeft
from midstride.engine.data.data_check import ensure_same_data
from midstride.engine.errors import NotExact, UserCodeError, UserError
from midstride.engine.formatting import format_names
from midstride.engine.lightning.counterparts import LightningRates
from midstride.engine.modules.callbacks import LearningRateMonitor
from midstride.engine.modules.module import has_step
from midstride.engine.modules.monitors import BestCheckpoint, Monitor
from midstride.engine.modules.timers import Timer
from midstride.engine.session.ending import STOPPED_BY_CALLBACK, Ending, EndReason
from midstride.engine.session.heartbeat import Phase
from midstride.engine.training.batch_transfer import batch_transfer
from midstride.engine.training.context import FitContext
from midstride.engine.training.evaluation import EvaluationLoop, ensure_shared_order
from midstride.engine.training.optimizer_step import OptimizerStep
from midstride.engine.training.step_check import StepCheck
from midstride.engine.trees import samples_in

__all__ = ["FitLoop"]

log = logging.getLogger(__name__)

#: callbacks that request no stop
_NEVER_STOP = (BestCheckpoint, LearningRateMonitor, LightningRates)


class FitLoop:
    """Runs the epochs and batches of a fit, with validation in between.

    Args:
        context: context of the fit.
        checkpointer: takes the snapshots; None if no snapshots are taken.

    Raises:
        NotExact: the epoch has fewer batches than the run has done.
        UserError: `val_check_interval` does not fit the number of batches.
    """

    def __init__(self, context: FitContext, checkpointer: Checkpointer | None = None) -> None:
        self.context, self.checkpointer = context, checkpointer
        self.progress, self.loader = context.progress, (loader := context.loaders.training)
        self._options, self._lanes, self._has_compared_data = context.options, context.lanes, False
        self._to_device = batch_transfer(context)
        self._on_fetch = context.faults_at("fetch")
        self._on_batch_start = context.hooks.bound("on_train_batch_start")
        self._on_batch_end = context.hooks.bound("on_train_batch_end")
        loader.set_at_end(self.progress.at_end)
        self._continue_if_time_is_left()
        self.optimizer_step = OptimizerStep(context)
        self._train = self._call_of_step()
        self._take = self._train_or_skip if self._options.skip_batches else self.train_batch
        self.boundary = StepBoundary(context, checkpointer)
        self.validation = self._validation_loop()
        self._monitors, self._warned = self._monitors_of_epochs(), list[Monitor]()
        if loader.is_sized and self.progress.batch > len(loader):
            raise NotExact(
                f"the run is at batch {self.progress.batch} of its epoch, and the epoch now has {len(loader)} batches. "
                "Use the data and the batch size of before, or another run name to start over."
            )
        self._set_length()
        self._ensure_end()

    def _validation_loop(self) -> EvaluationLoop | None:
        """Return the loop over the validation loaders; None without them."""
        context, loaders = self.context, self.context.loaders.validation
        if not (loaders and has_step(context.module, "validation_step")) or self._options.limit_val_batches == 0:
            return None
        return EvaluationLoop(context, "validate", loaders, self.checkpointer)

    def _call_of_step(self) -> Callable[[Any, int], Any]:
        """Return the function that trains on a batch; with `verify_every`, it does some steps twice."""
        step, every = self.optimizer_step, self._options.verify_every
        return step.train if every is None else StepCheck(self.context, step, self.checkpointer, every).train

    def _continue_if_time_is_left(self) -> None:
        """Withdraw a stop by an earlier attempt's clock if this one has more time."""
        is_over = any(isinstance(one, Timer) and one.is_over for one in self.context.callbacks)
        if self.progress.ended_by == EndReason.MAX_TIME and not is_over:
            self.progress.withdraw_stop()

    def _set_length(self) -> None:
        """Set the numbers of batches in the epoch opened last and between its validations."""
        #: number of batches in the epoch; None if it is unknown
        self.batches = self.loader.estimated_batches
        self.val_every = None if self.validation is None else self._val_every(self._options.val_check_interval)

    def _ensure_end(self) -> None:
        """Refuse training data without end if nothing would end the fit."""
        options, loader = self._options, self.loader
        if loader.endless is None or self.batches is not None or options.max_steps is not None:
            return
        if not any(type(callback) not in _NEVER_STOP for callback in self.context.callbacks):
            raise UserError(
                f"{loader.endless} does not end, and nothing would end the fit: set max_steps, or "
                "limit_train_batches for epochs of that many batches"
            )

    def _monitors_of_epochs(self) -> list[Monitor]:
        """Return the monitors judged at the end of each epoch, by choice or without validation."""
        monitors = [callback for callback in self.context.callbacks if isinstance(callback, Monitor)]
        if self.validation is None:
            return [one for one in monitors if one.check_on_train_epoch_end is not False]
        return [one for one in monitors if one.waits_for_epoch_end(self._options)]

    def _val_every(self, interval: float) -> int | None:
        """Return the batches between validations; None to validate at the end of each epoch."""
        if interval == 1.0 and isinstance(interval, float):
            return None
        if self.batches is None and isinstance(interval, float):
            raise UserError(
                f"val_check_interval={interval} is a share of an epoch, and the training data have no length. Use a "
                "number of batches, or 1.0 for the end of each epoch."
            )
        over_epochs = self._options.check_val_every_n_epoch is None
        is_first = self.progress.epoch == self.progress.batch == 0 and not self.progress.in_epoch
        if is_first and not over_epochs and self.loader.is_sized and interval > len(self.loader):
            raise UserError(
                f"val_check_interval={interval} batches is more than the {self.batches} of an epoch: no validation "
                "would run. Use a smaller number, a share such as 1.0, or check_val_every_n_epoch=None to count over "
                "epochs."
            )
        return interval if isinstance(interval, int) else max(1, int((self.batches or 0) * interval))

    def is_done(self) -> bool:
        """Return whether the fit is complete, or was stopped."""
        options, progress = self._options, self.progress
        return (
            self._is_stopped()
            or (options.max_epochs is not None and progress.epoch >= options.max_epochs)
            or (options.max_steps is not None and progress.step >= options.max_steps)
        )

    def _is_stopped(self) -> bool:
        """Return whether a stop was requested, and the minimum numbers of epochs and steps are done."""
        options, progress = self._options, self.progress
        return progress.stop and progress.epoch >= options.least_epochs and progress.step >= (options.min_steps or 0)

    def ending(self) -> Ending:
        """Return why the fit is complete, or was stopped."""
        options, progress = self._options, self.progress
        if self._is_stopped():
            return Ending(EndReason(progress.ended_by), progress.why) if progress.ended_by else STOPPED_BY_CALLBACK
        if options.max_epochs is not None and progress.epoch >= options.max_epochs:
            return Ending(EndReason.MAX_EPOCHS, f"max_epochs {options.max_epochs} reached")
        return Ending(EndReason.MAX_STEPS, f"max_steps {options.max_steps} reached")

    def run(self) -> None:
        """Train from the position in `progress` to the end."""
        self.validate_if_due()  # if resumed between a step and its validation
        self._end_epoch_if_over()  # if resumed between the last step of an epoch and its end
        while not self.is_done():
            self.train_epoch()
        self.context.finite_losses.verify()
        self.context.heartbeat.enter(Phase.EVALUATING)  # no step sends heartbeats from here on

    def end(self) -> None:
        """Call the hook at the end of training, in each attempt; its changes are in no snapshot."""
        context = self.context
        context.metric_logger.begin("train", closed="trained")
        with context.collective.timeout(self._options.collective_timeout_s), context.heartbeat.during(Phase.EVALUATING):
            context.hooks.call("on_train_end")

    def train_epoch(self) -> None:
        """Train to the end of this epoch, or to the end of the fit if that comes first."""
        context, progress, heartbeat = self.context, self.progress, self.context.heartbeat
        if not progress.in_epoch:
            progress.begin_epoch()
            with context.metric_logger.epoch_hook():
                context.hooks.call("on_train_epoch_start")
        batches = self.loader.batches(progress.epoch, progress.batch)
        self._set_length()
        context.reporter.expect(progress, self.batches, self._options)
        if self.checkpointer is not None:
            batches = self.checkpointer.watched_reads(batches)
        while not progress.at_end and not self.is_done():
            for fault in self._on_fetch:
                fault()
            heartbeat.begin_work()
            batch = self._to_device(self._next(batches))
            heartbeat.end_work(batches=1)
            self._note_bad()
            if progress.batch == 0 or self.loader.begins_pass:
                self._check_order()
            if not self._has_compared_data:
                self._compare_data()
            self._take(batch)
        self._end_epoch_if_over()

    def _train_or_skip(self, batch: Any) -> None:
        """Train on a batch, unless `skip_batches` names the step that it would be in."""
        number = self.progress.step + self.context.samples.skipped_steps + 1
        if any(number in _steps(text) for text in self._options.skip_batches):
            self._skip_batch(batch)
        else:
            self.train_batch(batch)

    def _skip_batch(self, batch: Any) -> None:
        """Count a batch without training on it.

        Raises:
            UserError: the snapshot has gradients of other batches of its step.
        """
        progress, samples, index = self.progress, self.context.samples, self.progress.batch
        skipped = {batch for epoch, batch in samples.skipped if epoch == progress.epoch}
        if trained := {*self.optimizer_step.window_before(index)} - skipped:
            raise UserError(
                f"skip_batches: step {progress.step + 1} cannot be left out: its batch {min(trained)} was trained "
                "on before the snapshot. Start from a snapshot of an earlier step"
            )
        self._record(batch, index)
        ends_step = self.optimizer_step.closes_window(index + 1)
        samples.skip_on_request(progress.epoch, index, ends_step=ends_step)
        if ends_step and self.context.world.is_first:
            log.info("skip_batches: batch %d of epoch %d is not trained on", index, progress.epoch)
        progress.batch_done(at_end=self.loader.at_end, stepped=False)
        self.boundary.between_steps()
        self.validate_if_due()

    def _next(self, batches: Iterator[Any]) -> Any:
        """Return the next batch.

        Raises:
            UserError: the epoch has none.
            UserCodeError: none of its samples can be read.
        """
        try:
            return next(batches)
        except NoSampleLeft as error:
            self._note_bad(error)
            raise
        except StopIteration:
            epoch = self.progress.epoch
            raise UserError(f"the training data have no batch in epoch {epoch}: the run stops before it") from None

    def _end_epoch_if_over(self) -> None:
        """End the epoch after its last batch or a requested stop; `max_steps` leaves it open."""
        progress = self.progress
        if progress.at_end or (progress.in_epoch and self._is_stopped()):
            self.end_epoch()

    def _check_order(self) -> None:
        """Log the epoch's order of samples; check that ranks agree on length and order."""
        context, progress = self.context, self.progress
        if progress.batch == 0 and (planned := self.loader.planned_indices()) is not None:
            context.samples.plan(progress.epoch, planned)
        if progress.batch == 0 and self.loader.is_sized:
            lengths = context.collective.gather(len(self.loader))
            if len({*lengths}) > 1:
                raise UserError(
                    f"the ranks have {lengths} training batches in epoch {progress.epoch}: all need the same number. "
                    "Change data and samplers in the same way on all ranks"
                )
        ensure_shared_order(context.collective, self.loader, f"epoch {progress.epoch}")

    def _note_bad(self, failure: NoSampleLeft | None = None) -> None:
        """Record samples that a rank could not read; fail on all ranks if they are too many.

        Args:
            failure: error of a batch of this rank without a readable sample.

        Raises:
            UserCodeError: too many samples cannot be read, or none of a batch of another rank.
        """
        samples, progress, options = self.context.samples, self.progress, self._options.bad_samples
        world, collective = self.context.world, self.context.collective
        bad = self.loader.take_bad_samples()
        for one in bad:
            if one.error != ON_REQUEST:
                log.warning("sample %s cannot be read and is left out: %s", one.sample, one.error)
        found = {world.rank: (bad, failure and str(failure))}
        if (options is not None or self._options.skip_samples) and world.size > 1:
            found = {} if collective.all_agree(not bad) else dict(enumerate(collective.gather(found[world.rank])))
        for rank, (ones, _) in found.items():
            for one in ones:
                samples.note_bad(progress.epoch, progress.batch, rank, one.sample, one.error)
        if failure is None and (other := next((text for _, text in found.values() if text), None)) is not None:
            raise NoSampleLeft(other)
        limit, errors = 0 if options is None else options.skip, samples.bad_samples()
        if len(errors) > limit:
            names = sorted(errors, key=lambda name: (len(name), name))
            raise UserCodeError(
                f"{len(errors)} samples cannot be read, and bad_samples leaves out {limit}: {format_names(names, 20)}. "
                f"The last one: {[*errors.values()][-1]}"
            )

    def _compare_data(self) -> None:
        """Compare the data of the ranks, and with those of an earlier attempt; called once."""
        self._has_compared_data = True
        context = self.context
        accepts_change, warns = "samples" in context.settings.accept_change, context.world.is_first
        everyone = context.collective.gather([*self.loader.data_digests()])
        if ensure_same_data(everyone, accepts_change=accepts_change, warns=warns):
            self.loader.accept_data()

    def train_batch(self, batch: Any) -> None:
        """Train on one batch, and step at the end of an accumulation window."""
        progress, index = self.progress, self.progress.batch
        self.context.metric_logger.begin_batch(batch, self.loader.weight)
        if self.checkpointer is not None:
            self._record(batch, index)
        for hook in self._on_batch_start:
            if (returned := hook(batch, index)) is not None:
                _ensure_epoch_goes_on(returned, index)
        outputs = self._train(batch, index)
        stepped = self.optimizer_step.stepped
        progress.batch_done(at_end=self.loader.at_end, stepped=stepped)
        scheduled = stepped and bool(self.context.schedulers)
        if scheduled:
            self.optimizer_step.step_schedulers("step", progress.batch, watching=False)
        for hook in self._on_batch_end:
            hook(outputs, batch, index)
        self.optimizer_step.zero_grad()
        if scheduled and not self._validation_is_due():  # else after it, with the values it logs
            self.optimizer_step.step_schedulers("step", progress.batch, watching=True)
        if stepped:
            self.boundary.after_step(self.batches, outputs)
        else:
            self.boundary.between_steps()
        self.validate_if_due()

    def _record(self, batch: Any, index: int) -> None:
        """Record the samples of a batch, for each lane if there are lanes, in the log of samples."""
        loader, samples, epoch = self.loader, self.context.samples, self.progress.epoch
        if self._lanes is None:
            count = loader.last_samples or samples_in(batch)
            samples.record(epoch, index, loader.last_indices, count, None, loader.last_mark)
        else:
            for lane, indices in getattr(loader, "indices_by_lane", dict.fromkeys(batch)).items():
                count = samples_in(batch[lane]) if indices is None else len(indices)
                samples.record(epoch, index, indices, count, lane, loader.last_mark)
        if loader.at_end and (digest := loader.read_digest()) is not None:
            samples.note_read(epoch, index + 1, digest, stateful=loader.had_states)

    def validate_if_due(self) -> None:
        """Validate at the interval, once at each position; resume an interrupted validation."""
        if self.validation is None or not self._validation_is_due():
            return
        self.context.finite_losses.verify()
        with self.context.heartbeat.during(Phase.EVALUATING):
            self.validation.run()
        if self.optimizer_step.closes_window(self.progress.batch):
            self.optimizer_step.step_schedulers("step", self.progress.batch, watching=True)
        self.progress.validation_done()

    def _validation_is_due(self) -> bool:
        progress, epochs = self.progress, self._options.check_val_every_n_epoch
        if self.validation is None or progress.validated == progress.batch:
            return False
        if epochs is not None and (progress.epoch + 1) % epochs:
            return False
        if self._is_stopped():
            return True
        batches = progress.batch if epochs is not None else progress.earlier_batches + progress.batch
        return progress.at_end if self.val_every is None else batches % self.val_every == 0

    def end_epoch(self) -> None:
        """Reduce the values logged in the epoch, step its schedulers, and start the next epoch."""
        context, progress = self.context, self.progress
        context.finite_losses.verify()
        with context.heartbeat.during(Phase.EVALUATING):
            context.inject_fault("epoch_end")
            if progress.at_end:
                self.optimizer_step.step_schedulers("epoch", progress.epoch + 1, watching=False)
            else:
                context.samples.break_off(progress.epoch)
            if context.hooks.has("on_train_epoch_end"):
                context.metric_logger.preview_epoch()
            with context.metric_logger.epoch_hook():  # values logged in the hook belong to this epoch
                context.hooks.call("on_train_epoch_end")
            self._judge_epoch(context.metric_logger.close_epoch())
        if progress.at_end:
            self.optimizer_step.step_schedulers("epoch", progress.epoch + 1, watching=True)
        progress.next_epoch()
        self.loader.set_at_end(False)

    def _judge_epoch(self, reduced: Mapping[str, float]) -> None:
        """Let monitors judge an epoch; without validation, by `reduced` and its last step's values."""
        logger, world = self.context.metric_logger, self.context.world
        of_epoch = {*reduced, *logger.names_of_steps()}
        known = logger.values.keys() & of_epoch  # not values of validations in an earlier attempt
        for monitor in self._monitors:
            if self.validation is not None or monitor.monitor in known:
                monitor.judge(self.context.trainer)
            elif world.is_first and monitor not in self._warned:
                self._warned.append(monitor)
                log.warning(
                    "%s has no effect: it monitors %s, which the epoch did not log, and there is no validation. "
                    "Logged: %s",
                    type(monitor).__name__,
                    monitor.monitor,
                    ", ".join(sorted(known)) or "nothing",
                )


def _steps(text: str) -> range:
    """Return the steps of an entry of `skip_batches`.

    >>> _steps("4-6")
    range(4, 7)
    """
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def _ensure_epoch_goes_on(returned: object, index: int) -> None:
    """Refuse -1 from `on_train_batch_start`, with which Lightning skips the rest of the epoch."""
    if isinstance(returned, int) and returned == -1:
        raise UserError(
            f"on_train_batch_start returned -1 for batch {index}: skipping the rest of an epoch is not supported. Use "
            "limit_train_batches, or set self.trainer.should_stop = True to end the fit"
        )
