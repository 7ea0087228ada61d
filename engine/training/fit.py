"""A fit: its parts put together, resumed from where the run stands, trained to the end."""

import logging
from typing import TYPE_CHECKING

from midstride.engine.data.loader import Feeds
from midstride.engine.data.resolve import Loaders
from midstride.engine.errors import JobError, WorldError
from midstride.engine.optim.optimizers import lazy_tensors, read_optimizers
from midstride.engine.seeds import rank_seed, seed_everything
from midstride.engine.session.last_seen import LastSeen
from midstride.engine.strategies.base import Strategy, TrainingStep
from midstride.engine.training.checkpointing.checkpointer import Recorder
from midstride.engine.training.checkpointing.run_store import Resume, Run
from midstride.engine.training.closures import closure_faults
from midstride.engine.training.loops import EvaluationLoop, FitLoop
from midstride.engine.training.unused import idle_evaluation, untrained_parameters
from midstride.engine.user_code import call_user_code

if TYPE_CHECKING:
    from midstride.engine.training.trainer import Trainer

__all__ = ["Fit", "recall"]

log = logging.getLogger(__name__)


def recall(trainer: "Trainer", run: str | None, resume: Resume) -> None:
    """Let the strategy go by what earlier lives of `run` have measured, if it measures."""
    options, strategy = trainer.snapshots, trainer.strategy
    if strategy.measures and run is not None and options is not None and resume != "never":
        kept = Run(run, strategy, options.keep, trainer.heartbeat, options.terms)
        strategy.recall(kept.newest_facts().get("strategy", {}))


class Fit:
    """One fit of a Trainer; making it makes the feeds, the optimizers and the wrapped module.

    Args:
        trainer: whose parts are used; it has met the other ranks and has the module ready.
        loaders: what is read.
    """

    def __init__(self, trainer: "Trainer", loaders: Loaders) -> None:
        self.trainer, self.source = trainer, loaders.source
        trainer.recorder = None
        self._seen: LastSeen | None = None
        self.feeds = Feeds(loaders.training(), loaders.evaluation("validate"))
        module, strategy, training = trainer.module, trainer.strategy, self.feeds.training
        if lazy := lazy_tensors(module):
            raise JobError(lazy)
        strategy.place(module, lambda: trainer.received(next(training.batches(0))))
        configured = call_user_code("configure_optimizers", module.configure_optimizers)
        trainer.optimizers, trainer.schedulers = read_optimizers(configured, module)
        if refused := self.mismatches(strategy):
            raise JobError("\n".join(refused))
        if trainer.world.is_first:
            idle = idle_evaluation(trainer, len(self.feeds.validation))
            for line in [*untrained_parameters(trainer.optimizers, module), *idle]:
                log.warning("%s", line)
        strategy.configured(trainer.optimizers, [config.scheduler for config in trainer.schedulers])
        one = module.automatic_optimization and len(trainer.optimizers) == 1
        trainer.wrapped = strategy.wrap(TrainingStep(module), one_backward=one)

    def mismatches(self, strategy: Strategy) -> list[str]:
        """Return messages on what of this fit `strategy` cannot do."""
        trainer = self.trainer
        faults = strategy.mismatches(trainer.optimizers, trainer.options, self.feeds.training.batch_size)
        by_hand = not trainer.module.automatic_optimization
        return faults if by_hand else [*faults, *closure_faults(trainer.optimizers, trainer.options, strategy)]

    def check(self) -> None:
        """Raise what stops a training before its first step, and a snapshot of state that cannot be written."""
        self._loop()
        Recorder.try_encoding(self.trainer, self.feeds, self.source)

    def run(self, run: str | None, resume: Resume) -> None:
        """Train to the end; arguments as those of `Trainer.fit`."""
        trainer = self.trainer
        trainer.run_url = run
        try:
            self._train(resume)
        except Exception as error:
            if trainer.recorder is not None:
                trainer.recorder.raise_cause(error)
            if self._seen is not None and trainer.strategy.lost_another(error):
                raise WorldError(self._words_of_lost(error, self._seen)) from error
            raise
        finally:
            if trainer.recorder is not None:
                trainer.recorder.close()

    def _train(self, resume: Resume) -> None:
        trainer, progress = self.trainer, self.trainer.progress
        loop = self._begun(resume)
        if (store := trainer.strategy.store()) is not None:
            self._seen = LastSeen(store, trainer.world, lambda: progress.step)
        with trainer.requests.heard(store, trainer.world, self._seen):
            if not (progress.finished and loop.is_done()):
                progress.finished = False
                with trainer.strategy.waiting_at_most(trainer.options.collective_timeout_s):
                    loop.run()
                progress.finished = True
            if trainer.recorder is not None:
                trainer.recorder.finish()
        trainer.hooks.call("on_fit_end")
        trainer.reporter.emit("finished", step=progress.step, epoch=progress.epoch)

    def _words_of_lost(self, error: Exception, seen: LastSeen) -> str:
        trainer = self.trainer
        kept = "a retry resumes from the newest snapshot" if trainer.recorder is not None else "no snapshots are taken"
        return (
            f"rank {trainer.world.rank} lost another rank after step {trainer.progress.step} "
            f"({(str(error).splitlines() or [''])[0]}): {seen.others()}; {kept}. Where a rank may keep the others "
            f"waiting for longer than collective_timeout_s, {trainer.options.collective_timeout_s:g} s, give it more"
        )

    def _begun(self, resume: Resume) -> FitLoop:
        """Stand where the run stands; return the loop that goes on from there."""
        trainer, feeds = self.trainer, self.feeds
        trainer.hooks.call("on_fit_start")
        trainer.module.train()
        # Before state is loaded: what this hook changes or draws must not come on top of it.
        trainer.hooks.call("on_train_start")
        resumed = False
        if trainer.run_url is not None and trainer.snapshots is not None:
            trainer.recorder = Recorder(trainer, trainer.run_url, trainer.snapshots, feeds, self.source)
            resumed = trainer.recorder.resume(resume)
        if not resumed:
            seed_everything(rank_seed(trainer.seed, trainer.world.rank), trainer.strategy.generator)
        loop = trainer.loop = self._loop()
        trainer.reporter.say(self._words())
        if resumed and loop.is_done():
            progress = trainer.progress
            trainer.reporter.say(f"nothing is left to train: {progress.epoch} epochs, {progress.step} steps are done")
        generation = trainer.recorder.generation if trainer.recorder is not None else None
        trainer.reporter.begin(trainer.progress, loop.batches, trainer.options, generation)
        return loop

    def _loop(self) -> FitLoop:
        trainer, feeds = self.trainer, self.feeds
        validation = EvaluationLoop(trainer, "validate", feeds.validation) if feeds.validation else None
        return FitLoop(trainer, feeds.training, validation)

    def _words(self) -> str:
        """Return in a line who trains, where, and on how many samples a step."""
        words, training = self.trainer.placement.words, self.feeds.training
        samples = training.facts().get("global_batch_size")
        if training.batch_size is None or samples is None:
            return words
        accumulated = self.trainer.options.accumulate_grad_batches
        windows = f" and {accumulated} of them" if accumulated > 1 else ""
        return f"{words}; batches of {training.batch_size}{windows} make {samples * accumulated} samples a step"
