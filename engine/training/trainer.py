"""The Trainer: builds the context of each call and runs the loops."""

import copy
import gc
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch

from midstride.engine.config.loggers import LoggerOptions, checked_loggers
from midstride.engine.config.options import SnapshotOptions, TrainerOptions, checked_options, short_precision
from midstride.engine.data.loader import FitLoaders, ResumableLoader
from midstride.engine.data.resolve import LoaderResolver, LoaderSettings
from midstride.engine.errors import EngineError, JobError, UserError
from midstride.engine.lightning.adapt import adapt
from midstride.engine.lightning.counterparts import update_lightning_callbacks
from midstride.engine.lightning.data import LightningData
from midstride.engine.loggers.build import logger_errors
from midstride.engine.modules.callbacks import Callback
from midstride.engine.modules.hooks import hook_faults
from midstride.engine.modules.module import DataModule, TrainingModule, attach, ensure_module
from midstride.engine.modules.progress import Progress
from midstride.engine.processes.lifetime import tie_to_parent
from midstride.engine.ranks.devices import UNSET, DeviceRequest, Hardware, ensure_devices
from midstride.engine.ranks.dispatch import on_all_ranks
from midstride.engine.ranks.placement import resolve_placement
from midstride.engine.ranks.predictions import of_loaders
from midstride.engine.session.script_exit import exit_codes_of_errors
from midstride.engine.snapshots.reader import weights_at
from midstride.engine.strategies.base import Strategy
from midstride.engine.strategies.build import build_strategy
from midstride.engine.strategies.mixins import Measures, device_generator, lanes_of, load_full_state_dict, stop_watching
from midstride.engine.training.checkpointing.run_store import Resume, run_url_of
from midstride.engine.training.checkpointing.world_size import apply_initial_sharding
from midstride.engine.training.context import EvaluationContext, TrainerSettings
from midstride.engine.training.determinism import Determinism
from midstride.engine.training.evaluation import EvaluationLoop, EvaluationStage, PredictionLoop, setup_evaluation
from midstride.engine.training.fit import Fit, earlier_facts
from midstride.engine.training.running_call import ensure_not_running, running_call, seed_call
from midstride.engine.training.setup import BoundCallback, set_up
from midstride.engine.training.trainer_state import TrainerState
from midstride.engine.world import World

__all__ = ["Trainer"]

_DEFAULT = SnapshotOptions.model_validate({})


def _given_options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `TrainerOptions` among the Trainer's `arguments` that are not left at their default."""
    defaults = Trainer.__init__.__kwdefaults__ or {}
    return {name: arguments[name] for name in TrainerOptions.model_fields if arguments[name] is not defaults[name]}


class Trainer(TrainerState):
    """Trains, validates, tests and predicts. A fit with a `run` takes snapshots, and resumes exactly from them.

    Args:
        strategy: the name of a strategy such as "ddp", "package.module:Class", or an instance of your own. By default
            "ddp" on several devices and "single" on one.
        strategy_args: keyword arguments of the strategy, such as {"static_graph": True}.
        devices: devices to use on each machine: a number, "auto" for all GPUs (the CPU if there are none), or a list
            of GPU indices. By default one.
        accelerator: "gpu", "cpu", or "auto" for GPUs if there are any.
        gpus: GPUs to use: the first n, -1 for all, or their indices as a list or text. None and 0 mean the CPU.
        tpu_cores: 1, 8, or a list with the index of one core; selects strategy "xla".
        num_nodes: number of machines, to be checked against what the launcher started.
        auto_select_gpus: choose GPUs that are not in use, as many as `gpus` or `devices` says.
        lanes: number of equal parts that every batch is cut into, a power of two: any number of ranks that divides it
            computes the same bits. The loader's `batch_size` then counts the samples of one part.
        global_batch_size: samples in a training batch over all ranks, which share them equally; it overrides the
            loader's `batch_size`. Not with lanes.
        snapshots: when the whole state is written, such as {"every_steps": 100}; None takes no snapshots.
        callbacks: one callback, or several.
        loggers: trackers that get the metric log, as in a job: "tensorboard", {"mlflow": {"tracking_uri": ...}}.
        seed: seeds Python, numpy and torch, alike on every rank. Build the Trainer before the module.
        accept_change: one or several keys of the run's identity that may differ from its snapshot, such as "seed".
        identity: further entries of the run's identity, for callers that build the module themselves.
        max_epochs: stop after this many passes over the data; -1 for no limit; 1000 if neither this nor `max_steps` is
            given.
        max_steps: stop after this many optimizer steps.
        min_epochs: passes over the data before early stopping may end the training.
        min_steps: optimizer steps before it may; without `min_epochs`, one epoch, too.
        precision: "32", "64", or mixed precision "bf16" or "16".
        accumulate_grad_batches: batches that make one optimizer step.
        gradient_clip_val: largest norm (or value) of the gradients; None, or 0, clips nothing.
        gradient_clip_algorithm: "norm" or "value".
        on_nan: action on a loss that is not finite: "fail" ends the run, "skip" leaves the batch out on every rank.
        val_check_interval: share of an epoch (0.5) or number of batches (100) between validations; None: a whole epoch.
        check_val_every_n_epoch: validate only in every n-th epoch; None: after every n-th batch, counted over epochs.
        limit_train_batches: share of the training batches (0.1) or number of them (10) to use; None: all.
        limit_val_batches: the same, of each validation loader.
        limit_test_batches: the same, of each test loader.
        rng: "lazy" gives each sample random numbers of its own in the data, "batch" one seed to a whole batch.
        use_distributed_sampler: give each rank its own share of the samples.
        deterministic: use only deterministic algorithms; by default where snapshots are taken.
        collective_timeout_s: seconds that the ranks wait for one that does not answer in training, before they fail.
        enable_progress_bar: show a progress bar on a terminal.
        others: arguments of Lightning's Trainer and of older versions: some are understood, the others are refused
            with what to use here.

    Raises:
        JobError: arguments are wrong; all faults are named at once.
    """

    def __init__(
        self,
        *,
        strategy: str | Strategy | None = None,
        strategy_args: Mapping[str, Any] | None = None,
        devices: int | str | Sequence[int] | None = None,
        accelerator: str = "auto",
        gpus: int | str | Sequence[int] | None = UNSET,
        tpu_cores: int | str | Sequence[int] | None = None,
        num_nodes: int | None = None,
        auto_select_gpus: bool = False,
        lanes: int | None = None,
        global_batch_size: int | None = None,
        snapshots: SnapshotOptions | Mapping[str, Any] | None = _DEFAULT,
        callbacks: Sequence[Callback] | Callback | None = (),
        loggers: Sequence[str | Mapping[str, Any] | LoggerOptions] = (),
        seed: int = 0,
        accept_change: str | Collection[str] | None = (),
        identity: Mapping[str, Any] | None = None,
        max_epochs: int | None = None,
        max_steps: int | None = None,
        min_epochs: int | None = None,
        min_steps: int | None = None,
        precision: Literal["32", "64", "bf16", "16"] | str | int = "32",
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: Literal["norm", "value"] = "norm",
        on_nan: Literal["fail", "skip"] = "fail",
        val_check_interval: int | float | None = 1.0,
        check_val_every_n_epoch: int | None = 1,
        limit_train_batches: int | float | None = 1.0,
        limit_val_batches: int | float | None = 1.0,
        limit_test_batches: int | float | None = 1.0,
        rng: Literal["lazy", "batch"] = "lazy",
        use_distributed_sampler: bool = True,
        deterministic: bool | None = None,
        collective_timeout_s: float = 600.0,
        enable_progress_bar: bool = True,
        **others: Any,
    ) -> None:
        options = {**_given_options(locals()), **others}
        tie_to_parent()
        #: arguments of this Trainer, from which ranks build a copy on their own devices
        self.arguments: dict[str, Any] = {"strategy": strategy, "strategy_args": strategy_args, "callbacks": callbacks}
        self.arguments |= {"lanes": lanes, "seed": seed, "accept_change": accept_change, "identity": identity}
        self.arguments |= {"loggers": loggers, "global_batch_size": global_batch_size}
        self.arguments |= {"snapshots": snapshots, **options}
        request = DeviceRequest(
            strategy=strategy,
            strategy_args=strategy_args or {},
            devices=devices,
            gpus=gpus,
            num_nodes=num_nodes,
            auto_select_gpus=auto_select_gpus,
            precision=short_precision(precision),
            tpu_cores=tpu_cores,
            lanes=lanes,
            accelerator=accelerator,
        )
        with exit_codes_of_errors():
            self.placement, faults = resolve_placement(request, Hardware.here())
            asked, unknown = checked_loggers(loggers)
            checked = checked_options(options, snapshots, seed, [*faults, *unknown, *logger_errors(asked)])
        accepted = (accept_change,) if isinstance(accept_change, str) else tuple(accept_change or ())
        settings = TrainerSettings(*checked, seed, accepted, dict(identity or {}), asked, global_batch_size)
        super().__init__(self.placement.strategy, settings, callbacks)
        seed_call(seed)

    # Public methods -----------------------------------------------------------------------------

    @on_all_ranks
    def fit(
        self,
        module: TrainingModule,
        data: Any = None,
        val_dataloaders: Any = None,
        *,
        run: str | os.PathLike[str] | None = None,
        resume: Resume = "auto",
    ) -> None:
        """Train `module` on `data` to the end; resume from the newest good snapshot of `run` if there is one.

        Args:
            module: what to train.
            data: a DataModule, or a training DataLoader or nest of them; None if the module defines the loaders.
            val_dataloaders: one or several validation loaders; by default those of the DataModule, or of the module.
            run: folder or fsspec URL of the run, which an earlier call may have begun; None writes nothing.
            resume: "auto", "never" (start over in the same folder), or the step of a snapshot.
        """
        if resume not in ("auto", "never") and type(resume) is not int:
            raise UserError(f'resume={resume!r}: "auto", "never" or the step of a snapshot, a number, is needed')
        run = None if run is None else run_url_of(run)
        is_recorded = run is not None and self.settings.snapshots is not None
        self.reset_callbacks()
        with self._prepare(module, data, "fit") as ready, Determinism(self.options.deterministic, on=is_recorded):
            self.last_fit = None
            try:
                self.is_fitting = True
                earlier = earlier_facts(ready, run, resume)
                if isinstance(self.strategy, Measures):
                    self.strategy.load_measurements(earlier.get("strategy", {}))
                with closing(self._loaders(module, train=data, evaluate=val_dataloaders)) as loaders:
                    self.last_fit = self._fit_of(ready, loaders, earlier)
                    self.context, self.run_url = self.last_fit.context, run
                    self.last_fit.run(run, resume, self.placement.summary)
            finally:
                self.is_fitting = False
                stop_watching(self.strategy)
                self.reporter.close()
                update_lightning_callbacks(self)

    @on_all_ranks
    def validate(self, module: TrainingModule, data: Any = None, *, ckpt_path: str | None = None) -> dict[str, float]:
        """Validate `module`; return what it logged, reduced over batches and ranks, by name. Arguments as of `test`."""
        with self._evaluation(module, data, "validate", ckpt_path) as resumables:
            return EvaluationLoop(self.context, "validate", resumables).run()

    @on_all_ranks
    def test(self, module: TrainingModule, data: Any = None, *, ckpt_path: str | None = None) -> dict[str, float]:
        """Test `module`; return what it logged, reduced over batches and ranks, by name.

        Args:
            module: what to test.
            data: a DataModule, or one or several DataLoaders to test on; None if the module defines them.
            ckpt_path: "best" or "last" of the run fitted last, or the path of such a folder or of a file that
                `save_checkpoint` wrote; None for the current weights.
        """
        with self._evaluation(module, data, "test", ckpt_path) as resumables:
            return EvaluationLoop(self.context, "test", resumables).run()

    @on_all_ranks
    def predict(self, module: TrainingModule, data: Any = None, *, ckpt_path: str | None = None) -> list[Any]:
        """Return the outputs of `predict_step` for every batch of this rank; for several loaders, a list for each.

        Arguments as of `test`. With `ddp_spawn`, `ddp_fork` and `ddp_notebook`, the outputs of all ranks follow each
        other.
        """
        with self._evaluation(module, data, "predict", ckpt_path) as resumables:
            loop = PredictionLoop(self.context, resumables)
            loop.run()
            return of_loaders(loop.predictions)

    def check(self, module: TrainingModule, data: Any = None, *, processes: int = 1) -> list[str]:
        """Return messages on what would stop a fit on `processes` processes before its first step.

        The check runs in this process, on a copy of this Trainer. `fit` may be called afterwards.
        """
        adapt(module)
        adapt(data)
        lanes = lanes_of(self.strategy)
        meant, alone = copy.copy(self.strategy), build_strategy("single", lanes=None if lanes is None else lanes.count)
        trainers = module._trainer
        meant.attach(World(size=processes, local_size=processes), self.strategy.devices)
        # Ranks that are forked later cannot use a GPU that this process has used.
        alone.attach(World(), [torch.device("cpu")] if self.placement.start == "fork" else self.strategy.devices)
        refused, trial = self.with_strategy(meant)._module_errors(module, data), self.with_strategy(alone)
        try:
            with trial._prepare(module, data, "fit") as ready:
                fit = trial._fit_of(ready, trial._loaders(module, train=data), {})
                refused += fit.errors(meant)
                fit.check()
        except EngineError as error:
            return [*refused, str(error)]
        finally:
            attach(module, trainers[0] if trainers else None)
        return refused

    # Context of a call ----------------------------------------------------------------------------

    def _module_errors(self, module: TrainingModule, data: object) -> list[str]:
        """Return messages on hooks and settings of `module` and `data` that this Trainer does not support."""
        by_hand = not module.automatic_optimization
        unknown = hook_faults(module, self.callbacks, data)
        return [*unknown, *self.strategy.module_errors(module), *self.precision.module_errors(by_hand=by_hand)]

    @contextmanager
    def _prepare(
        self, module: TrainingModule, data: Any, stage: str, ckpt_path: str | None = None
    ) -> Iterator[EvaluationContext]:
        """Initialize the process group, set up module and data for `stage`, and load weights from `ckpt_path`."""
        ensure_module(module, stage)
        ensure_not_running(self, module, stage)
        self.take_callbacks(module)
        if refused := self._module_errors(module, data):
            raise JobError("\n".join(refused))
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            if stage == "fit":
                gc.collect()  # reference cycles keep the module of an earlier fit, and its GPU memory, alive
        self.reporter.emit("imported")
        self.strategy.init_process_group()
        ensure_devices(self.strategy)
        self.reporter.emit("met")
        # setup draws the same random numbers on every rank and in every attempt.
        seed_call(self.settings.seed, device_generator(self.strategy))
        attach(module, self)
        self.context = replace(self.context, module=module)
        self.loaders, self._datamodule = None, data if isinstance(data, DataModule) else None
        if isinstance(data, LightningData):
            attach(data, self)
        self.metric_logger.begin("train", closed="setup")
        with running_call(self, module, stage), set_up(self._owners(module), stage, self.strategy, self.heartbeat):
            self.context = self._context_of(module, Progress() if stage == "fit" else self.progress)
            if ckpt_path is not None:
                load_full_state_dict(self.strategy, module, weights_at(self.weights_url(ckpt_path)).state_dict)
            yield self.context

    @contextmanager
    def _evaluation(
        self, module: TrainingModule, data: Any, stage: EvaluationStage, ckpt_path: str | None
    ) -> Iterator[list[ResumableLoader]]:
        """Prepare an evaluation, with a copy of the counts of the last fit; yield its loaders."""
        preparing = self._prepare(module, data, stage, ckpt_path)
        with preparing as ready, closing(self._loaders(module, evaluate=data)) as loaders:
            resumables = setup_evaluation(ready, stage, loaders)
            self.context = replace(ready, progress=replace(ready.progress, validating=False))
            try:
                yield resumables
            finally:
                self.context = ready
                self.metric_logger.begin(stage, closed="reduced")

    def _owners(self, module: TrainingModule) -> list[Any]:
        """Return the objects with `setup` and `teardown`, in the order of the calls."""
        data = [] if self._datamodule is None else [self._datamodule]
        return [*data, *(BoundCallback(callback, self, module) for callback in self.callbacks), module]

    def _fit_of(self, ready: EvaluationContext, loaders: LoaderResolver, earlier: Mapping[str, Any]) -> Fit:
        """Return a fit; `earlier` are the facts of the run's newest snapshot.

        The loaders are built first, since `configure_optimizers` may read the number of batches.
        """
        self.loaders = FitLoaders(loaders.training(), loaders.evaluation("validate"), loaders.given)
        apply_initial_sharding(self.loaders, earlier, ready.world.size)
        return Fit(ready, self.loaders, loaders.source)

    def _loaders(self, module: TrainingModule, *, train: Any = None, evaluate: Any = None) -> LoaderResolver:
        strategy = self.strategy
        seed, batch = self.settings.seed, self.settings.global_batch_size
        settings = LoaderSettings(strategy.data_world, self.options, seed, lanes_of(strategy), batch)
        return LoaderResolver(settings, self.strategy.collective, module, train=train, evaluate=evaluate)
