"""A fit: builds its context, resumes from a snapshot, and trains to the end."""

import inspect
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from midstride.engine.checkpointing.checkpointer import Checkpointer
from midstride.engine.checkpointing.context import RunSettings
from midstride.engine.checkpointing.determinism import refuse_cudnn_dropout
from midstride.engine.checkpointing.rank_warnings import RankWarnings
from midstride.engine.checkpointing.run_store import Resume, RunStore
from midstride.engine.checkpointing.sample_log import SampleLog
from midstride.engine.config.loggers import run_name_faults
from midstride.engine.config.options import TrainerOptions
from midstride.engine.config.overrides import is_own
from midstride.engine.data.loader import FitLoaders, ResumableLoader
from midstride.engine.errors import JobError, LossNotFinite, UserCodeError, UserError, WorldError
from midstride.engine.formatting import format_count, url_name
from midstride.engine.loggers.base import Conclusion
from midstride.engine.loggers.logger_processes import conclude
from midstride.engine.modules.hooks import own_hook
from midstride.engine.modules.module import TrainingModule
from midstride.engine.modules.schedules import largest_window
from midstride.engine.optim.optimizers import lazy_tensors, read_optimizers
from midstride.engine.processes.preload import collector_paused
from midstride.engine.seeds import rank_seed, seed_everything
from midstride.engine.session.liveness import LastSeen
from midstride.engine.session.replay_plan import NEVER
from midstride.engine.snapshots.catalog import SnapshotCatalog
from midstride.engine.snapshots.parent import open_run
from midstride.engine.state.module_index import ModuleIndex
from midstride.engine.storage.store import Store, StoreOptions
from midstride.engine.strategies.base import Strategy
from midstride.engine.strategies.step import TrainingStep
from midstride.engine.training.batch_transfer import batch_transfer
from midstride.engine.training.closures import closure_faults
from midstride.engine.training.context import EvaluationContext, FitContext
from midstride.engine.training.evaluation import extra_step
from midstride.engine.training.fit_loop import FitLoop
from midstride.engine.training.fit_state import fit_state
from midstride.engine.training.fit_warnings import idle_evaluation, layers_in_eval_mode, untrained_parameters
from midstride.engine.user_code import call_user_code

__all__ = ["Fit", "earlier_facts"]

log = logging.getLogger(__name__)

#: the step in the message of a loss that is not finite
_STEP = re.compile(r"step (\d+), rank")
#: parts of gloo's messages that are left out: the place in its code, and its advice
_GLOO_DETAILS = re.compile(r"\[[^]]*\.cc:\d+\] |\. This is typically caused by .*")


def earlier_facts(context: EvaluationContext, run: str | None, resume: Resume) -> dict[str, Any]:
    """Return the facts of the newest snapshot of `run`, for the time before its restore; or {}.

    {} is returned if there is none, and with strategy `single` or with lanes: there the batches do not depend on the
    number of ranks, and the strategy has no measurements.
    """
    options, strategy = context.settings.snapshots, context.strategy
    if run is None or options is None or resume == "never" or context.lanes is not None or strategy.name == "single":
        return {}
    return RunStore(run, strategy, options.keep, context.heartbeat, options.store_options).newest_facts()


class Fit:
    """One fit of a Trainer; the constructor configures the optimizers and wraps the module.

    Args:
        ready: context with the module, whose process group is initialized.
        loaders: training and validation loaders.
        source: DataModule, module or loaders that they are made from.
    """

    def __init__(self, ready: EvaluationContext, loaders: FitLoaders, source: object) -> None:
        self.context = _build_context(ready, loaders, source)
        #: takes the snapshots; None until `run` begins, and in a fit without snapshots
        self.checkpointer: Checkpointer | None = None
        self._last_seen: LastSeen | None = None
        self._run: str | None = None

    def errors(self, strategy: Strategy) -> list[str]:
        """Return messages on settings of this fit that `strategy` does not support."""
        context = self.context
        batch_size = context.loaders.training.batch_size
        options = largest_window(context.options, context.callbacks)
        return _fit_errors(strategy, context.module, context.optimizers, options, batch_size)

    def save_weights(self, folder: Literal["best", "last"]) -> None:
        """Save the weights to `folder` of the run, if snapshots are taken."""
        if self.checkpointer is not None:
            self.context.finite_losses.verify()
            self.checkpointer.save_weights(folder)

    def tell_trackers(self, test: Mapping[str, float]) -> None:
        """Send the results of a test to the trackers of this fit, with why it ended."""
        context, progress = self.context, self.context.progress
        if self._run is not None and context.world.is_first and progress.finished:
            conclusion = Conclusion("done", progress.why, progress.step, test)
            conclude(context.settings.loggers, Store.open(self._run, StoreOptions("none")), conclusion)

    def check(self) -> None:
        """Raise errors that would stop a fit before its first step, or stop a snapshot."""
        FitLoop(self.context)
        Checkpointer.try_encoding(fit_state(self.context))

    def run(self, run: str | None, resume: Resume, devices: str, *, take_over: bool = False) -> None:
        """Train to the end.

        Args:
            run: folder or URL of the run, or None.
            resume: as in `Trainer.fit`.
            devices: description of the devices for the user.
            take_over: as in `Trainer.fit`.
        """
        context, progress, self._run = self.context, self.context.progress, run
        with self._errors_explained():
            if (store := context.collective.key_value_store()) is not None:
                self._last_seen = LastSeen(store, context.world, lambda: progress.step)
            loop = self._begin(run, resume, take_over)
            takes_snapshots = self.checkpointer is not None
            with context.requests.listening(store, context.world, self._last_seen, takes_snapshots=takes_snapshots):
                # These lines and this event invite requests, so they come once signals are heard.
                self._announce(loop, run, devices)
                generation = self.checkpointer.generation if self.checkpointer is not None else None
                context.reporter.begin(progress, loop.batches, context.options, generation)
                if not (progress.finished and loop.is_done()):
                    progress.begin_fit()
                    with context.collective.timeout(context.options.collective_timeout_s), self._replay_named():
                        loop.run()
                    progress.end_fit(loop.ending())
                    context.reporter.announce(f"{progress.why}, after step {progress.step:,}")
                self._finish(loop)
            context.hooks.call("on_fit_end")
            ending = loop.ending()
            context.reporter.emit(
                "finished",
                step=progress.step,
                epoch=progress.epoch,
                ended_by=ending.reason.value,
                why=ending.sentence,
            )

    def _finish(self, loop: FitLoop) -> None:
        """Call the hooks at the end of training, which may change the module, and commit the end."""
        has_hooks = self.context.hooks.has("on_train_end")
        if self.checkpointer is None or not has_hooks:
            loop.end()
        if self.checkpointer is not None:
            self.checkpointer.finish(loop.end if has_hooks else None)

    @contextmanager
    def _errors_explained(self) -> Iterator[None]:
        """Raise a block's error as its cause, a failed snapshot or a lost rank; close the snapshots."""
        at_once = False
        try:
            yield
        except KeyboardInterrupt as error:
            at_once = True
            self.context.hooks.call_on_exception(error, "fit")
            raise
        except Exception as error:
            self.context.hooks.call_on_exception(error, "fit")
            cause = error if self.checkpointer is None else self.checkpointer.cause_of(error)
            if self._last_seen is not None and self._is_loss_of_rank(cause):
                raise WorldError(self._lost_rank_message(cause, self._last_seen)) from error
            if cause is not error:
                raise cause from error
            raise
        finally:
            if self.checkpointer is not None:
                self.checkpointer.close(at_once=at_once)

    @contextmanager
    def _replay_named(self) -> Iterator[None]:
        """Add to a user's error in a step, or over its loss, the command that replays it."""
        try:
            yield
        except (LossNotFinite, UserCodeError) as error:
            snapshots, progress = self.context.settings.snapshots, self.context.progress
            is_replay = snapshots is not None and snapshots.every_steps == NEVER
            if self.checkpointer is not None and not (progress.validating or is_replay):
                found = _STEP.search(str(error)) if isinstance(error, LossNotFinite) else None
                self._name_replay(error, int(found[1]) if found else progress.step + 1)
            raise

    def _name_replay(self, error: LossNotFinite | UserCodeError, step: int) -> None:
        if self.context.settings.identity:  # of a job, whose launcher passes the message on
            anomaly = " --anomaly" if isinstance(error, LossNotFinite) else ""
            error.add_line(f"look into it:  midstride replay {self._run} --step {step}{anomaly}")
        else:
            call = f'trainer.replay(module, data, run="{self._run}", step={step})'
            error.add_note(f"look into it:  with {call} as at: ...")

    def _is_loss_of_rank(self, error: Exception) -> bool:
        """Return whether `error` says that another rank ended, in a step or during a snapshot."""
        collective, origin = self.context.collective, error.__cause__
        if isinstance(error, WorldError) and isinstance(origin, Exception) and collective.is_peer_failure(origin):
            return True
        return collective.is_peer_failure(error)

    def _lost_rank_message(self, error: Exception, seen: LastSeen) -> str:
        context = self.context
        way_on = "a retry resumes from the newest snapshot" if self.checkpointer is not None else "there is no snapshot"
        said = _GLOO_DETAILS.sub("", (str(error).splitlines() or [""])[0])
        return (
            f"rank {context.world.rank} lost another rank after step {context.progress.step} "
            f"({said}): {seen.others()}; {way_on}. If ranks may wait for each other longer than "
            f"{context.options.collective_timeout_s:g} s, raise collective_timeout_s"
        )

    def _begin(self, run: str | None, resume: Resume, take_over: bool) -> FitLoop:
        """Call the first hooks and resume from a snapshot, or seed; return the loop."""
        context, snapshots = self.context, self.context.settings.snapshots
        _check_loggers(context.settings, run)
        context.hooks.call("on_fit_start")
        # Before state is loaded, which overrides what the hook changes or draws.
        with context.metric_logger.epoch_hook():
            context.hooks.call("on_train_start")
        resumed = False
        if run is not None and snapshots is not None:
            refuse_cudnn_dropout(context.module)
            index, warnings = ModuleIndex.of(context.module), RankWarnings(context.world, context.collective.gather)
            with warnings.merge_ranks(), collector_paused(), index.kept():
                state = fit_state(context)
            self.checkpointer = Checkpointer(context, state, run, snapshots)
            resumed = self.checkpointer.resume(resume, take_over=take_over)
        elif run is not None and resume != "never":
            _refuse_to_start_over(run)
        if not resumed:
            rank = context.world.rank if context.lanes is None else 0  # each lane is seeded when it runs
            seed_everything(rank_seed(context.settings.seed, rank), context.generator)
        return FitLoop(context, self.checkpointer)

    def _announce(self, loop: FitLoop, run: str | None, devices: str) -> None:
        """Log devices and batch sizes, and whether nothing is kept or left to train."""
        context, progress = self.context, self.context.progress
        context.reporter.announce(self._announcement(devices))
        if run is None and context.settings.snapshots is not None:
            context.reporter.announce('this fit saves nothing: fit(..., run="runs/first") saves it and can resume')
        if progress.step and loop.is_done():
            done = f"{format_count(progress.epoch, 'epoch')}, {format_count(progress.step, 'step')}"
            context.reporter.announce(f"nothing is left to train: {done} done; {loop.ending().sentence}")

    def _announcement(self, devices: str) -> str:
        """Return a line with the devices and the number of samples in a step."""
        training, options = self.context.loaders.training, self.context.options
        samples = training.order_identity().get("global_batch_size")
        if training.batch_size is None or samples is None:
            return devices
        accumulated = options.accumulate_grad_batches
        windows = f" and {accumulated} of them" if accumulated > 1 else ""
        return f"{devices}; batches of {training.batch_size}{windows} make {samples * accumulated} samples a step"


def _check_loggers(settings: RunSettings, run: str | None) -> None:
    """Check that loggers would get the rows of `run`.

    Raises:
        UserError: there is no run, or no snapshots.
        JobError: a tracker does not accept the name of the run.
    """
    if settings.loggers and (run is None or settings.snapshots is None):
        raise UserError(
            "loggers receive rows when a snapshot is committed: fit needs a run, as in fit(run=...), with snapshots on"
        )
    if run is not None and (faults := run_name_faults(settings.loggers, url_name(run))):
        raise JobError.of(f"fit(run={run!r})", faults)


def _refuse_to_start_over(run: str) -> None:
    """Refuse to train a run that has snapshots, when snapshots are off.

    Raises:
        UserError: the run has snapshots; the newest is named.
    """
    if taken := SnapshotCatalog(open_run(run, StoreOptions("none"))).snapshots():
        raise UserError(
            f"{run} has snapshots (newest: {taken[-1].name}), and with snapshots=None (null) a fit cannot resume. To "
            "resume, leave the option out; to start over, use another run name"
        )


def _build_context(ready: EvaluationContext, loaders: FitLoaders, source: object) -> FitContext:
    """Return a fit's context: `ready` with loaders, optimizers and the wrapped training step.

    Raises:
        JobError: the module has lazy tensors, or the strategy does not support the fit.
    """
    module, strategy, options = ready.module, ready.strategy, largest_window(ready.options, ready.callbacks)
    if lazy := lazy_tensors(module):
        raise JobError(lazy)
    for name in ("training_step", "configure_optimizers"):
        if getattr(module, name) is None:
            raise JobError(f"{type(module).__name__}.{name} is None on this object, and a fit calls it: do not set it")
    strategy.setup_module(module, ready.scope, lambda: _peek_batch(ready, loaders.training))
    with collector_paused():  # the first optimizer of a process imports torch._dynamo
        configured = call_user_code("configure_optimizers", module.configure_optimizers)
    optimizers, schedulers = read_optimizers(configured, module)
    if refused := _fit_errors(strategy, module, optimizers, options, loaders.training.batch_size):
        raise JobError("\n".join(refused))
    if ready.world.is_first:
        idle = idle_evaluation(module, ready.callbacks, len(loaders.validation), options)
        unused = untrained_parameters(optimizers, module) if optimizers else []
        for line in [*unused, *layers_in_eval_mode(module), *idle]:
            log.warning("%s", line)
    strategy.setup_optimizers(optimizers, [config.scheduler for config in schedulers])
    step = TrainingStep(module, ready.scope, strategy.step_call(ready.scope, module, "training_step"))
    one = module.automatic_optimization and len(optimizers) == 1
    return FitContext(
        **vars(ready),
        loaders=loaders,
        source=source,
        samples=SampleLog(strategy.data_world.rank, strategy.data_world.size),
        optimizers=optimizers,
        schedulers=schedulers,
        step=_wrapped(strategy, step, one_backward=one),
    )


def _peek_batch(context: EvaluationContext, loader: ResumableLoader) -> Any:
    """Return the first batch of `loader`, and restore the state of samplers and data."""
    before = loader.state_dict()
    with extra_step(context, loader):
        batch = batch_transfer(context)(next(loader.batches(0)))
    loader.load_state_dict(before)
    return batch


def _wrapped(strategy: Strategy, step: TrainingStep, *, one_backward: bool) -> nn.Module:
    """Return `step` wrapped by `strategy`.

    Raises:
        UserCodeError: a strategy of the user's own raised.
        UserError: it returned no module.
    """
    if not is_own(type(strategy)):
        return strategy.wrap(step, one_backward=one_backward)
    where = f"{type(strategy).__name__}.wrap"
    wrapped = call_user_code(where, partial(strategy.wrap, step, one_backward=one_backward))
    if not isinstance(wrapped, nn.Module):
        raise UserError(f"{where} returned {wrapped!r}: return the step, or a module around it")
    return wrapped


def _fit_errors(
    strategy: Strategy,
    module: TrainingModule,
    optimizers: Sequence[Optimizer],
    options: TrainerOptions,
    batch_size: int | None,
) -> list[str]:
    """Return messages on settings of a fit that `strategy` or `options` do not support."""
    faults = strategy.fit_errors(optimizers, options, batch_size)
    if not module.automatic_optimization:
        return faults
    if options.precision == "16" and own_hook(module, "optimizer_step") is not None:
        faults = [
            *faults,
            f"precision 16 with {type(module).__name__}.optimizer_step: it bypasses the gradient scaler, which skips "
            "steps with gradients that are not finite. Use precision bf16, or remove optimizer_step",
        ]
    return [*faults, *_step_errors(module, len(optimizers)), *closure_faults(optimizers, options, strategy)]


def _unsharded(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method wrapped by `fully_shard`, whose wrapper hides the first parameter."""
    origin = getattr(step, "__wrapped__", None)
    return origin if inspect.ismethod(origin) else step


def _step_errors(module: TrainingModule, optimizers: int) -> list[str]:
    """Return a message if a training step for several optimizers lacks `optimizer_idx`."""
    if optimizers < 2:
        return []
    try:
        inspect.signature(_unsharded(module.training_step)).bind(None, 0, 0)
    except ValueError:  # it has no signature
        return []
    except TypeError:
        name = type(module).__name__
        return [
            f"{name}.configure_optimizers returned {optimizers} optimizers, and {name}.training_step takes no "
            "optimizer_idx: the step is called once for each optimizer. Write training_step(self, batch, batch_idx, "
            "optimizer_idx), or set automatic_optimization = False and step them in training_step"
        ]
    return []
