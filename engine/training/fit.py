"""A fit: its parts put together, resumed from where the run stands, trained to the end."""

import logging
from collections.abc import Sequence
from typing import Literal

from torch.optim import Optimizer

from midstride.engine.config.options import TrainerOptions
from midstride.engine.data.loader import FitLoaders
from midstride.engine.data.resolve import LoaderResolver
from midstride.engine.errors import JobError, WorldError
from midstride.engine.modules.module import TrainingModule
from midstride.engine.optim.optimizers import lazy_tensors, read_optimizers
from midstride.engine.seeds import rank_seed, seed_everything
from midstride.engine.session.last_seen import LastSeen
from midstride.engine.strategies.base import Strategy, TrainingStep
from midstride.engine.training.checkpointing.checkpointer import Recorder
from midstride.engine.training.checkpointing.run_store import Resume, Run
from midstride.engine.training.closures import closure_faults
from midstride.engine.training.context import EvaluationContext, FitContext
from midstride.engine.training.loops import FitLoop
from midstride.engine.training.sample_log import SampleAccount
from midstride.engine.training.unused import idle_evaluation, untrained_parameters
from midstride.engine.user_code import call_user_code

__all__ = ["Fit", "recall"]

log = logging.getLogger(__name__)


def recall(context: EvaluationContext, run: str | None, resume: Resume) -> None:
    """Let the strategy go by what earlier lives of `run` have measured, if it measures."""
    options, strategy = context.settings.snapshots, context.strategy
    if strategy.measures and run is not None and options is not None and resume != "never":
        kept = Run(run, strategy, options.keep, context.heartbeat, options.store_options)
        strategy.recall(kept.newest_facts().get("strategy", {}))


class Fit:
    """One fit of a Trainer; making it makes the feeds, the optimizers and the wrapped module.

    Args:
        ready: the module, in a world that has met.
        loaders: what is read.
    """

    def __init__(self, ready: EvaluationContext, loaders: LoaderResolver) -> None:
        self.context = _put_together(ready, loaders)
        #: takes the snapshots of a fit that is kept
        self.recorder: Recorder | None = None
        self._seen: LastSeen | None = None

    def mismatches(self, strategy: Strategy) -> list[str]:
        """Return messages on what of this fit `strategy` cannot do."""
        context = self.context
        batch_size = context.feeds.training.batch_size
        return _mismatches(strategy, context.module, context.optimizers, context.options, batch_size)

    def save_weights(self, folder: Literal["best", "last"]) -> None:
        """Have the weights written to `folder` of the run, if it is kept."""
        if self.recorder is not None:
            self.recorder.save_weights(folder)

    def check(self) -> None:
        """Raise what stops a training before its first step, and a snapshot of state that cannot be written."""
        FitLoop(self.context)
        Recorder.try_encoding(self.context)

    def run(self, run: str | None, resume: Resume, place: str) -> None:
        """Train to the end.

        Args:
            run: folder or URL of the run.
            resume: as that of `Trainer.fit`.
            place: where is trained, for the person at the terminal.
        """
        try:
            self._train(run, resume, place)
        except Exception as error:
            if self.recorder is not None:
                self.recorder.raise_cause(error)
            if self._seen is not None and self.context.strategy.lost_another(error):
                raise WorldError(self._words_of_lost(error, self._seen)) from error
            raise
        finally:
            if self.recorder is not None:
                self.recorder.close()

    def _train(self, run: str | None, resume: Resume, place: str) -> None:
        context, progress = self.context, self.context.progress
        loop = self._begun(run, resume, place)
        if (store := context.strategy.store()) is not None:
            self._seen = LastSeen(store, context.world, lambda: progress.step)
        with context.requests.listening(store, context.world, self._seen):
            if not (progress.finished and loop.is_done()):
                progress.begin_fit()
                with context.strategy.waiting_at_most(context.options.collective_timeout_s):
                    loop.run()
                progress.end_fit()
            if self.recorder is not None:
                self.recorder.finish()
        context.hooks.call("on_fit_end")
        context.reporter.emit("finished", step=progress.step, epoch=progress.epoch)

    def _words_of_lost(self, error: Exception, seen: LastSeen) -> str:
        context = self.context
        kept = "a retry resumes from the newest snapshot" if self.recorder is not None else "no snapshots are taken"
        return (
            f"rank {context.world.rank} lost another rank after step {context.progress.step} "
            f"({(str(error).splitlines() or [''])[0]}): {seen.others()}; {kept}. Where a rank may keep the others "
            f"waiting for longer than collective_timeout_s, {context.options.collective_timeout_s:g} s, give it more"
        )

    def _begun(self, run: str | None, resume: Resume, place: str) -> FitLoop:
        """Stand where the run stands; return the loop that goes on from there."""
        context, snapshots = self.context, self.context.settings.snapshots
        context.hooks.call("on_fit_start")
        context.module.train()
        # Before state is loaded: what this hook changes or draws must not come on top of it.
        context.hooks.call("on_train_start")
        resumed = False
        if run is not None and snapshots is not None:
            self.recorder = Recorder(context, run, snapshots)
            resumed = self.recorder.resume(resume)
        if not resumed:
            seed_everything(rank_seed(context.settings.seed, context.world.rank), context.strategy.generator)
        loop = FitLoop(context, self.recorder)
        context.reporter.say(self._words(place))
        progress = context.progress
        if resumed and loop.is_done():
            context.reporter.say(f"nothing is left to train: {progress.epoch} epochs, {progress.step} steps are done")
        generation = self.recorder.generation if self.recorder is not None else None
        context.reporter.begin(progress, loop.batches, context.options, generation)
        return loop

    def _words(self, place: str) -> str:
        """Return in a line who trains, where, and on how many samples a step."""
        training, options = self.context.feeds.training, self.context.options
        samples = training.facts().get("global_batch_size")
        if training.batch_size is None or samples is None:
            return place
        accumulated = options.accumulate_grad_batches
        windows = f" and {accumulated} of them" if accumulated > 1 else ""
        return f"{place}; batches of {training.batch_size}{windows} make {samples * accumulated} samples a step"


def _put_together(ready: EvaluationContext, loaders: LoaderResolver) -> FitContext:
    """Return what a fit works with: what is read, the optimizers, and the wrapped training step."""
    module, strategy, options = ready.module, ready.strategy, ready.options
    feeds = FitLoaders(loaders.training(), loaders.evaluation("validate"))
    if lazy := lazy_tensors(module):
        raise JobError(lazy)
    strategy.place(module, lambda: ready.to_device(next(feeds.training.batches(0))))
    optimizers, schedulers = read_optimizers(
        call_user_code("configure_optimizers", module.configure_optimizers), module
    )
    if refused := _mismatches(strategy, module, optimizers, options, feeds.training.batch_size):
        raise JobError("\n".join(refused))
    if ready.world.is_first:
        idle = idle_evaluation(module, ready.callbacks, len(feeds.validation))
        for line in [*untrained_parameters(optimizers, module), *idle]:
            log.warning("%s", line)
    strategy.configured(optimizers, [config.scheduler for config in schedulers])
    one = module.automatic_optimization and len(optimizers) == 1
    return FitContext(
        **vars(ready),
        feeds=feeds,
        source=loaders.source,
        samples=SampleAccount(strategy.readers.rank, strategy.readers.size),
        optimizers=optimizers,
        schedulers=schedulers,
        step=strategy.wrap(TrainingStep(module), one_backward=one),
    )


def _mismatches(
    strategy: Strategy,
    module: TrainingModule,
    optimizers: Sequence[Optimizer],
    options: TrainerOptions,
    batch_size: int | None,
) -> list[str]:
    """Return messages on what of a fit `strategy` cannot do."""
    faults = strategy.mismatches(optimizers, options, batch_size)
    by_hand = not module.automatic_optimization
    return faults if by_hand else [*faults, *closure_faults(optimizers, options, strategy)]
