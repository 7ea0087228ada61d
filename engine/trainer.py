"""The Trainer: puts the parts of a training together and hands them to the loops."""

import copy
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from midstride.engine.attributes import Modes
from midstride.engine.callbacks import BestCheckpoint, Callback, EarlyStopping
from midstride.engine.data.loader import ExactLoader
from midstride.engine.data.loaders import Loaders
from midstride.engine.determinism import Determinism
from midstride.engine.devices import device_of, move
from midstride.engine.errors import EngineError, JobError, UserError
from midstride.engine.faults import FaultPlan
from midstride.engine.hooks import Hooks, calling
from midstride.engine.logged import Logged
from midstride.engine.loops import EvaluationLoop, FitLoop
from midstride.engine.metrics import Metrics
from midstride.engine.module import DataModule, TrainingModule
from midstride.engine.optimizers import SchedulerConfig, read_optimizers
from midstride.engine.options import SnapshotOptions, checked_options
from midstride.engine.precision import Precision
from midstride.engine.progress import Progress
from midstride.engine.recorder import Recorder
from midstride.engine.reporter import Reporter
from midstride.engine.run import Resume
from midstride.engine.seeds import rank_seed, seed_everything
from midstride.engine.snapshots.weights import weights_at
from midstride.engine.strategies import build_strategy
from midstride.engine.strategies.base import TrainingStep
from midstride.engine.world import World

if TYPE_CHECKING:
    from midstride.engine.job import TrainingJob

__all__ = ["Trainer"]

log = logging.getLogger(__name__)
_DEFAULT = SnapshotOptions.model_validate({})


class Trainer:
    """Trains, validates, tests and predicts; resumes exactly.

    Args:
        strategy: a name from `midstride.engine.strategies.STRATEGIES`; by itself "ddp" in a world of several
            processes and "single" alone.
        snapshots: when the whole state is written; None for never.
        callbacks: what acts beside the module.
        seed: of everything random. Build the Trainer before the module: it seeds every rank alike.
        accept_change: keys of a run's identity that may differ from its snapshot's.
        identity: what else makes this run this run, for callers that build the module themselves.
        options: the fields of `TrainerOptions`.

    Raises:
        JobError: with every fault of the arguments at once.
    """

    def __init__(
        self,
        *,
        strategy: str | None = None,
        snapshots: SnapshotOptions | Mapping[str, Any] | None = _DEFAULT,
        callbacks: Sequence[Callback] = (),
        seed: int = 0,
        accept_change: Collection[str] = (),
        identity: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.options, self.snapshots = checked_options(options, snapshots)
        self.world = World.from_environment()
        self.device = device_of(self.world)
        strategy = strategy or ("ddp" if self.world.size > 1 else "single")
        self.strategy = build_strategy(strategy, self.world, self.device)
        if self.strategy.name == "single" and self.world.size > 1:
            raise JobError(f"strategy single has one process, this world has {self.world.size}; for more choose ddp")
        self.seed, self.accept_change, self.identity = seed, tuple(accept_change), dict(identity or {})
        self.callbacks = list(callbacks)
        self._pristine = [copy.deepcopy(callback.state_dict()) for callback in self.callbacks]
        #: whether a fit is under way; an evaluation on its own moves no monitor
        self.is_fitting = False
        self.precision = Precision(self.options.precision, self.device)
        self.progress = Progress()
        self.module: TrainingModule = TrainingModule()
        self.wrapped: nn.Module = self.module
        self.optimizers: list[Optimizer] = []
        self.schedulers: list[SchedulerConfig] = []
        self.logged = Logged(self.strategy.gather, Metrics(self.module, self.strategy.gather, 1), 1)
        self.hooks = Hooks(self, self.module, ())
        self.modes = Modes(self.module)
        self.recorder: Recorder | None = None
        self.reporter = Reporter(self.world, bar=self.options.enable_progress_bar)
        self._faults = FaultPlan.from_environment()
        self._run_url: str | None = None
        self._loop: FitLoop | None = None
        seed_everything(seed)

    @classmethod
    def from_job(cls, job: "TrainingJob") -> "Trainer":
        """Return the Trainer that `job` describes."""
        callbacks: list[Callback] = []
        if job.monitor is not None:
            callbacks.append(BestCheckpoint(job.monitor.metric, job.monitor.mode))
            if job.monitor.patience is not None:
                callbacks.append(EarlyStopping(job.monitor.metric, job.monitor.patience, job.monitor.mode))
        return cls(
            strategy=job.world.strategy,
            snapshots=job.snapshots,
            callbacks=callbacks,
            seed=job.seed,
            accept_change=job.accept_change,
            identity={key: getattr(job, key) for key in ("module", "module_args", "data", "data_args")},
            **job.trainer.model_dump(),
        )

    # What a user calls --------------------------------------------------------------------------

    def fit(self, module: TrainingModule, data: Any = None, *, run: str | None = None, resume: Resume = "auto") -> None:
        """Train `module` on `data` to the end, from the newest good snapshot of `run` if there is one.

        Args:
            module: what to train.
            data: a DataModule, or a training DataLoader; None if the module has the loaders itself.
            run: folder or fsspec URL of the run; the same one again resumes. None keeps nothing.
            resume: "auto", "never" (start over in the same folder), or the step of a snapshot.
        """
        self._begin(module, data, "fit")
        self.progress = Progress()
        for callback, state in zip(self.callbacks, self._pristine, strict=True):
            callback.load_state_dict(copy.deepcopy(state))  # nothing of an earlier fit goes on
        with Determinism(self.options.deterministic, on=run is not None and self.snapshots is not None):
            try:
                self.is_fitting = True
                self._fit(Loaders(self, module if data is None else data), run, resume)
            finally:
                self.is_fitting = False
                self.reporter.close()

    def validate(self, module: TrainingModule, data: Any = None, *, ckpt_path: str | None = None) -> dict[str, float]:
        """Return the reduced values of a validation; `ckpt_path` as in `test`."""
        return self._evaluate("validate", module, data, ckpt_path)

    def test(self, module: TrainingModule, data: Any = None, *, ckpt_path: str | None = None) -> dict[str, float]:
        """Return the reduced values of a test.

        Args:
            module: what to test.
            data: as in `fit`.
            ckpt_path: "best" or "last" of the run just fitted, or the path of such a folder; None for the
                module as it is.
        """
        return self._evaluate("test", module, data, ckpt_path)

    def predict(self, module: TrainingModule, data: Any = None, *, ckpt_path: str | None = None) -> list[Any]:
        """Return what `predict_step` returns for every batch of this rank; `ckpt_path` as in `test`."""
        self._begin(module, data, "predict")
        self._load_weights(ckpt_path)
        self.module.to(self.device).eval()
        predictions = []
        with torch.no_grad():
            for number, loader in enumerate(Loaders(self, module if data is None else data).evaluation("predict")):
                for index, batch in enumerate(map(self.received, loader.batches(0))):
                    with self.precision.forward():
                        predictions.append(calling("predict_step", self.module.predict_step, batch, index, number))
        return predictions

    def check(self, module: TrainingModule, data: Any = None) -> list[str]:
        """Return what would stop a fit before its first step, tried in this process alone."""
        self.strategy = build_strategy("single", World(), self.device)
        try:
            self._begin(module, data, "fit")
            self._put_together(Loaders(self, module if data is None else data))
            Recorder.try_encoding(self)
        except EngineError as error:
            return [str(error)]
        return []

    # What loops, hooks and callbacks call ---------------------------------------------------------

    @property
    def callback_metrics(self) -> dict[str, float]:
        """The newest logged values by name, alike on every rank."""
        return self.logged.values

    def received(self, batch: Any) -> Any:
        """Return `batch` on this rank's device, in the width that the module trains in."""
        return self.precision.batch(move(batch, self.device))

    def strike(self, phase: str) -> None:
        """Let an injected fault strike here."""
        if self._faults is not None:
            self._faults.at(self.world.rank, self.progress.step, phase)

    def stepped(self, batches: int, outputs: Any) -> None:
        """Close a step: its row, its event, and a snapshot if one is due."""
        self.logged.rows.step(self.progress.epoch, self.progress.step)
        self.reporter.step(self.progress, batches, outputs)
        self.strike("after_step")
        self.boundary()

    def boundary(self) -> None:
        """Take a snapshot if one is due here."""
        if self.recorder is not None:
            self.recorder.boundary()
        else:
            self.logged.rows.forget()

    def evaluated(self, stage: str, values: dict[str, float]) -> None:
        """Tell whoever listens what an evaluation gave."""
        if stage == "validate":
            self.reporter.emit("validation", step=self.progress.step, epoch=self.progress.epoch, metrics=values)

    def check_finite(self, loss: Tensor) -> None:
        """Refuse to go on from a loss that is not finite."""
        if self._loop is not None:
            self._loop.optimization.check_finite(loss)

    def save_weights(self, folder: Literal["best", "last"]) -> None:
        """Keep the module's weights in the run's folder; without a run there is nowhere to keep them."""
        if self.recorder is not None:
            self.recorder.save_weights(folder)

    # Putting together -----------------------------------------------------------------------------

    def _begin(self, module: TrainingModule, data: Any, stage: str) -> None:
        """Meet the other ranks and get module and data ready for `stage`."""
        self.strategy.init_process_group()
        # Whatever setup draws is the same on every rank and in every life.
        seed_everything(self.seed)
        self.module = module
        module._trainer = [self]
        if isinstance(data, DataModule):
            if stage == "fit" and self.world.local_rank == 0:
                calling(f"{type(data).__name__}.prepare_data", data.prepare_data)
            self.strategy.gather(None)
            calling(f"{type(data).__name__}.setup", data.setup, stage)
        self.precision = Precision(self.options.precision, self.device)
        self.precision.convert(module)
        module.to(self.device)
        module.device = self.device
        metrics = Metrics(module, self.strategy.gather, self.world.size)
        self.logged = Logged(self.strategy.gather, metrics, self.world.size)
        self.hooks = Hooks(self, module, self.callbacks)
        self.modes = Modes(module)

    def _fit(self, loaders: Loaders, run: str | None, resume: Resume) -> None:
        training, validation = self._put_together(loaders)
        self.hooks.call("on_fit_start")
        self.module.train()
        # Before state is loaded: what this hook changes or draws must not come on top of it.
        self.hooks.call("on_train_start")
        self._run_url, self.recorder = run, None
        resumed = False
        if run is not None and self.snapshots is not None:
            self.recorder = Recorder(self, run, self.snapshots, training, loaders.source)
            resumed = self.recorder.resume(resume)
        if not resumed:
            seed_everything(rank_seed(self.seed, self.world.rank))
        self._loop = loop = FitLoop(
            self, training, EvaluationLoop(self, "validate", validation) if validation else None
        )
        generation = self.recorder.generation if self.recorder is not None else None
        self.reporter.begin(self.progress, loop.batches, self.options, generation)
        if not (self.progress.finished and loop.is_done()):
            self.progress.finished = False
            loop.run()
            self.progress.finished = True
        if self.recorder is not None:
            self.recorder.finish()
        self.hooks.call("on_fit_end")
        self.reporter.emit("finished", step=self.progress.step, epoch=self.progress.epoch)

    def _put_together(self, loaders: Loaders) -> tuple[ExactLoader, list[ExactLoader]]:
        """Make the loaders, the optimizers and the wrapped module."""
        training, validation = loaders.training(), loaders.evaluation("validate")
        configured = calling("configure_optimizers", self.module.configure_optimizers)
        self.optimizers, self.schedulers = read_optimizers(configured, self.module)
        one = self.module.automatic_optimization and len(self.optimizers) == 1
        self.wrapped = self.strategy.wrap(TrainingStep(self.module), one_backward=one)
        return training, validation

    def _evaluate(
        self, stage: Literal["validate", "test"], module: TrainingModule, data: Any, ckpt_path: str | None
    ) -> dict[str, float]:
        self._begin(module, data, stage)
        self._load_weights(ckpt_path)
        loaders = Loaders(self, module if data is None else data).evaluation(stage)
        if not loaders:
            raise UserError(f"there is no {stage} loader: write {'val' if stage == 'validate' else stage}_dataloader.")
        self.recorder = None
        fitted, self.progress = self.progress, Progress()
        try:
            return EvaluationLoop(self, stage, loaders).run()
        finally:
            self.progress = fitted

    def _load_weights(self, ckpt_path: str | None) -> None:
        if ckpt_path is None:
            return
        if ckpt_path in ("best", "last"):
            if self._run_url is None:
                raise UserError(
                    f"ckpt_path={ckpt_path!r} is a folder of a run: fit with run=... first, or give a path."
                )
            ckpt_path = f"{self._run_url.rstrip('/')}/{ckpt_path}"
        self.module.load_state_dict(weights_at(ckpt_path).state_dict)
