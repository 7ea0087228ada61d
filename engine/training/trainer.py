"""The Trainer: trains, validates, tests and predicts.

Each call builds an `EvaluationContext` with everything that its loop uses, and runs the loop.
"""

import copy
import gc
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, Self, cast

import torch
from torch import Tensor, is_anomaly_enabled
from torch.autograd import set_detect_anomaly
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import Optimizer

from midstride.engine.checkpointing.context import RunSettings
from midstride.engine.checkpointing.determinism import Determinism
from midstride.engine.checkpointing.finite_losses import FiniteLosses
from midstride.engine.checkpointing.reporter import Reporter
from midstride.engine.checkpointing.run_store import Resume, run_url_of
from midstride.engine.checkpointing.world_size import apply_initial_sharding
from midstride.engine.config.lightning_names import NEUTRAL_OPTIONS, trial_options, without_neutral
from midstride.engine.config.loggers import LoggerOptions, checked_loggers
from midstride.engine.config.options import (
    LONG_PRECISIONS,
    SnapshotOptions,
    TrainerOptions,
    checked_options,
    short_precision,
)
from midstride.engine.data.loader import FitLoaders, ResumableLoader
from midstride.engine.data.resolve import LoaderResolver, LoaderSettings
from midstride.engine.errors import EngineError, JobError, ReplayEnd, UserError
from midstride.engine.fault_injection import FaultPlan, PhaseWatcher
from midstride.engine.formatting import format_value
from midstride.engine.lightning.adapt import adapt
from midstride.engine.lightning.callbacks import with_counterparts
from midstride.engine.lightning.checkpoint import export_weights, exported_checkpoint, remove_exported
from midstride.engine.lightning.counterparts import update_lightning_callbacks
from midstride.engine.lightning.loggers import logger_options
from midstride.engine.lightning.module import LightningData
from midstride.engine.lightning.results import Results
from midstride.engine.lightning.trainer import LightningTrainer
from midstride.engine.loggers.build_logger import logger_errors
from midstride.engine.metrics.lane_logger import LaneLogger
from midstride.engine.metrics.lane_metrics import LaneMetrics
from midstride.engine.metrics.logger import MetricLogger
from midstride.engine.metrics.torchmetrics_state import TorchmetricsState
from midstride.engine.modules.callbacks import Callback, FixedCallbacks, first_state, keep_first_state
from midstride.engine.modules.compiled import compile_in_place, compile_layers_in_place, compile_module
from midstride.engine.modules.hooks import Hooks, hook_faults, own_hook
from midstride.engine.modules.interface import TrainerInterface
from midstride.engine.modules.module import DataModule, TrainingModule, attach, ensure_module, has_step, set_device
from midstride.engine.modules.module_state import TrainingModes
from midstride.engine.modules.monitors import Monitor
from midstride.engine.modules.progress import Progress
from midstride.engine.modules.schedules import window_of
from midstride.engine.modules.state_entries import described
from midstride.engine.modules.structure import ModuleStructure, structure_of, take_weights
from midstride.engine.modules.timers import Timer
from midstride.engine.optim.precision import Precision
from midstride.engine.optim.schedulers import SchedulerConfig
from midstride.engine.processes.lifetime import tie_to_parent
from midstride.engine.ranks.devices import UNSET, DeviceRequest, Hardware, ensure_devices
from midstride.engine.ranks.dispatch import of_loaders, on_all_ranks
from midstride.engine.ranks.placement import resolve_placement
from midstride.engine.seeds import reserved_generators
from midstride.engine.session.ending import STOPPED_BY_CALLBACK, Ending
from midstride.engine.session.heartbeat import Heartbeat
from midstride.engine.session.replay_plan import NEVER, ReplayPlan
from midstride.engine.session.requests import SignalRequests
from midstride.engine.session.script_exit import exit_codes_of_errors
from midstride.engine.snapshots.forks import fork, snapshot_before
from midstride.engine.snapshots.parent import open_run
from midstride.engine.snapshots.reader import weights_at
from midstride.engine.snapshots.weights import newest_weights
from midstride.engine.storage.draft import draft_of
from midstride.engine.storage.store import Store
from midstride.engine.strategies.base import Strategy
from midstride.engine.strategies.build_strategy import build_strategy
from midstride.engine.strategies.mixins import (
    Measures,
    ModelParallel,
    ShardsWeights,
    device_generator,
    full_state_dict,
    gradient_buckets,
    lanes_of,
    load_full_state_dict,
    stop_watching,
)
from midstride.engine.strategies.step import StepScope
from midstride.engine.training.calls import BoundCallback, ensure_not_running, running_call, seed_call, set_up
from midstride.engine.training.context import EvaluationContext
from midstride.engine.training.evaluation import EvaluationLoop, EvaluationStage, PredictionLoop, setup_evaluation
from midstride.engine.training.fit import Fit, earlier_facts
from midstride.engine.training.step_replay import StepReplay
from midstride.engine.user_code import call_user_code
from midstride.engine.world import World

__all__ = ["Trainer"]

_DEFAULT = SnapshotOptions.model_validate({})
#: arguments that ranks get in any case, beside the options that were given
_FOR_RANKS = (
    *("strategy", "strategy_args", "callbacks", "lanes", "seed", "accept_change", "identity"),
    *("fast_dev_run", "barebones", "sync_batchnorm"),
)
#: hooks that can build layers: a module that has one is checked after them
_BUILDERS = ("setup", "configure_model")
#: strategies that do not take compiled modules
_NOT_COMPILED = ("dp", "ddp2", "pipeline", "xla")
#: parts of a metric logger's state that remain after a call
_NEWEST = ("values", "names", "evaluation_values")


class Trainer(TrainerInterface):
    """Trains, validates, tests and predicts.

    A fit with a `run` takes snapshots, and resumes exactly from them.

    Args:
        strategy: the name of a strategy such as "ddp", "package.module:Class", or an instance of your own. By default
            "ddp" on several devices and "single" on one.
        strategy_args: keyword arguments of the strategy, such as {"static_graph": True}.
        devices: devices to use on each machine: a number, "auto" for all GPUs (the CPU if there are none), or a list
            of GPU indices. By default one.
        accelerator: "gpu", "cpu", or "auto" for GPUs if there are any.
        gpus: GPUs to use: the first n, -1 for all, or their indices as a list or text. None and 0 mean the CPU.
        tpu_cores: 1, 8, or a list with the index of one core; selects strategy "xla".
        num_nodes: number of machines; checked against the number that the launcher started.
        auto_select_gpus: choose free GPUs, as many as `gpus` or `devices` says.
        lanes: number of equal parts of every batch, a power of two. Any number of ranks that divides it computes the
            same bits. The loader's `batch_size` then counts the samples of one part.
        global_batch_size: samples in a training batch over all ranks, in equal shares; it overrides the loader's
            `batch_size`. Not with lanes.
        snapshots: when to write the whole state, such as {"every_steps": 100}; None takes no snapshots.
        callbacks: one callback, or several.
        loggers: trackers that receive the metric log, as in a job: "tensorboard", {"mlflow": {"tracking_uri": ...}}.
        seed: seed of Python, numpy and torch, the same on all ranks. Build the Trainer before the module.
        accept_change: one or several keys of the run's identity that may differ from its snapshot, such as "seed".
        identity: further entries of the run's identity, for callers that build the module themselves.
        max_epochs: stop after this many passes over the data; -1 for no limit; 1000 if neither this nor `max_steps` is
            given.
        max_steps: stop after this many optimizer steps.
        min_epochs: passes over the data before early stopping can end the training.
        min_steps: optimizer steps before early stopping can end the training; without `min_epochs`, also one epoch.
        max_time: stop after this time in training, over all attempts: seconds, "DD:HH:MM:SS", a timedelta, or its
            arguments as a dict.
        precision: "32", "64", or mixed precision "bf16" or "16".
        accumulate_grad_batches: batches that make one optimizer step.
        gradient_clip_val: largest norm (or value) of the gradients; None, or 0, clips nothing.
        gradient_clip_algorithm: "norm" or "value".
        on_nan: action on a loss that is not finite: "fail" ends the run, "skip" skips the batch on all ranks.
        verify_every: execute every n-th step twice and compare, to find machines that compute wrongly; None: never.
        skip_batches: steps whose batches are read and not trained on, such as ["4810-4830"].
        skip_samples: indices of training samples that are left out of their batches.
        bad_samples: {"skip": 20} leaves out up to 20 training samples whose reading raises an error; None: none.
        val_check_interval: share of an epoch (0.5) or number of batches (100) between validations; None: a whole epoch.
        check_val_every_n_epoch: validate only in every n-th epoch; None: after every n-th batch, counted over epochs.
        limit_train_batches: share of the training batches (0.1) or number of them (10) to use; None: all.
        limit_val_batches: the same, of each validation loader.
        limit_test_batches: the same, of each test loader.
        limit_predict_batches: the same, of each prediction loader.
        overfit_batches: train and validate on this share or number of batches, without shuffling.
        fast_dev_run: try everything on one batch (True) or n batches of each loader, without snapshots and loggers.
        barebones: no snapshots, loggers and progress bar.
        rng: "lazy" seeds the random numbers of the data for each sample, "batch" for each batch.
        use_distributed_sampler: give each rank its own share of the samples.
        deterministic: use only deterministic algorithms; by default if snapshots are taken.
        compile: compile the calls of the module and its layers; True, or arguments of `torch.compile`.
        benchmark: let cuDNN measure which algorithms are fastest; with snapshots only if `deterministic` is False.
        detect_anomaly: name the operation whose gradient is NaN; slow.
        sync_batchnorm: with ddp, normalise over the batches of all ranks; without effect on one process.
        collective_timeout_s: seconds that ranks wait for a rank that does not answer in training, before they fail.
        enable_progress_bar: show a progress bar on a terminal.
        others: arguments of Lightning's Trainer, also of its older versions. Some are understood; the others are
            refused with a substitute.

    Raises:
        JobError: arguments are wrong; the message names all faults.
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
        max_time: str | float | timedelta | Mapping[str, float] | None = None,
        precision: Literal["32", "64", "bf16", "16"] | str | int = "32",
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: Literal["norm", "value"] = "norm",
        on_nan: Literal["fail", "skip"] = "fail",
        verify_every: int | None = None,
        skip_batches: Sequence[str | int] = (),
        skip_samples: Sequence[int] = (),
        bad_samples: Mapping[str, int] | None = None,
        val_check_interval: int | float | None = 1.0,
        check_val_every_n_epoch: int | None = 1,
        limit_train_batches: int | float | None = 1.0,
        limit_val_batches: int | float | None = 1.0,
        limit_test_batches: int | float | None = 1.0,
        limit_predict_batches: int | float | None = 1.0,
        overfit_batches: int | float = 0,
        fast_dev_run: int | bool = False,
        barebones: bool = False,
        rng: Literal["lazy", "batch"] = "lazy",
        use_distributed_sampler: bool = True,
        deterministic: bool | None = None,
        compile: bool | Mapping[str, Any] | None = None,
        benchmark: bool | None = None,
        detect_anomaly: bool = False,
        sync_batchnorm: bool = False,
        collective_timeout_s: float = 600.0,
        enable_progress_bar: bool = True,
        **others: Any,
    ) -> None:
        given = locals()
        defaults = Trainer.__init__.__kwdefaults__ or {}
        options = {name: given[name] for name in TrainerOptions.model_fields if given[name] is not defaults[name]}
        if others.get("enable_checkpointing") is False and snapshots is _DEFAULT:
            snapshots = others.pop("enable_checkpointing") or None
        loggers = (*loggers, *logger_options(others.pop("logger", None)))
        options |= without_neutral(others, NEUTRAL_OPTIONS)
        if fast_dev_run or barebones:
            snapshots, loggers = None, ()
        options |= trial_options(fast_dev_run) | ({"enable_progress_bar": False} if barebones else {})
        tie_to_parent()
        #: arguments of this Trainer, from which ranks build a copy on their own devices
        self.arguments: dict[str, Any] = {name: given[name] for name in _FOR_RANKS}
        self.arguments |= {
            "global_batch_size": global_batch_size,
            "snapshots": snapshots,
            "loggers": loggers,
            "default_root_dir": others.get("default_root_dir"),
            **options,
        }
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
            sync_batchnorm=sync_batchnorm,
        )
        with exit_codes_of_errors():
            self.placement, faults = resolve_placement(request, Hardware.here())
            asked, unknown = checked_loggers(loggers)
            checked = checked_options(options, snapshots, seed, [*faults, *unknown, *logger_errors(asked)])
        accepted = (accept_change,) if isinstance(accept_change, str) else tuple(accept_change or ())
        self.strategy: Strategy = self.placement.strategy
        self.settings = RunSettings(*checked, seed, accepted, dict(identity or {}), asked, global_batch_size)
        timers = [] if self.options.max_time is None else [Timer(self.options.max_time)]
        self._given = [*self._pairs(callbacks), *((None, timer) for timer in timers)]
        #: the given callbacks and those of the module of the current or last call: see `TrainerInterface`
        self.callback_pairs = self._given
        self.callbacks = FixedCallbacks(_counterparts(self._given))
        self._first_states = [first_state(callback) for callback in self.callbacks]
        plan, self.requests = ReplayPlan.from_environment(), SignalRequests()
        self._faults: PhaseWatcher | None = FaultPlan.from_environment()
        if plan is not None:
            self._faults = StepReplay(plan, lambda: self.last_fit)
        self.heartbeat = Heartbeat.of(self.world)
        self.reporter = Reporter(self.world, bar=self.options.enable_progress_bar)
        self.is_fitting = False
        self.verb, self.status = "", "initializing"
        self.run_url: str | None = None
        #: loaders of the current or last fit
        self.loaders: FitLoaders | None = None
        #: the loaders of the current or last call as they were given, by stage
        self.given_loaders: Mapping[str, Any] = {}
        self._datamodule: DataModule | None = None
        #: the current or last fit
        self.last_fit: Fit | None = None
        #: context of the current or last call; before the first one, that of an empty module
        self.context: EvaluationContext = self._context_of(TrainingModule(), Progress())
        self._own = frozenset({*vars(self), "_own"})
        seed_call(seed)

    # Calls ----------------------------------------------------------------------------------------

    @on_all_ranks
    def fit(
        self,
        module: TrainingModule,
        data: Any = None,
        val_dataloaders: Any = None,
        *,
        run: str | os.PathLike[str] | None = None,
        resume: Resume = "auto",
        take_over: bool = False,
    ) -> None:
        """Train `module` on `data`; resume from the newest good snapshot of `run`, if any.

        Args:
            module: the module to train.
            data: a DataModule, or a training DataLoader or nest of them; None if the module defines the loaders.
            val_dataloaders: one or several validation loaders; by default those of the DataModule, or of the module.
            run: folder or fsspec URL of the run; the same `run` again resumes it. None writes nothing.
            resume: "auto", "never" (start over in the same folder), or the step of a snapshot.
            take_over: take the run from another process that trains it now; else that is an error.
        """
        if resume not in ("auto", "never") and type(resume) is not int:
            raise UserError(f'resume={resume!r}: "auto", "never" or the step of a snapshot, a number, is needed')
        run = None if run is None else run_url_of(run)
        is_recorded = run is not None and self.settings.snapshots is not None
        self.reset_callbacks()
        options = self.options
        determinism = Determinism(options.deterministic, on=is_recorded, benchmark=options.benchmark)
        errors_told = self._errors_told("fit")
        with reserved_generators(), errors_told, self._prepare(module, data, "fit") as ready, determinism:
            self.last_fit = None
            try:
                self.is_fitting = True
                earlier = earlier_facts(ready, run, resume)
                if isinstance(self.strategy, Measures):
                    self.strategy.load_measurements(earlier.get("strategy", {}))
                with closing(self._loaders(module, train=data, evaluate=val_dataloaders)) as loaders:
                    self.last_fit = self._fit_of(ready, loaders, earlier)
                    self.context, self.run_url = self.last_fit.context, run
                    remove_exported(self)
                    self.last_fit.run(run, resume, self.placement.summary, take_over=take_over)
                    export_weights(self, module)
            finally:
                self.is_fitting = False
                stop_watching(self.strategy)
                self.reporter.close()
                update_lightning_callbacks(self)

    @contextmanager
    def replay(
        self,
        module: TrainingModule,
        data: Any = None,
        val_dataloaders: Any = None,
        *,
        run: str | os.PathLike[str],
        step: int,
    ) -> Iterator[StepReplay]:
        """Train again up to the gradients of one step of `run`, which does not change.

        It runs in one process. In the block, the module has the weights before that step, and its gradients. The value
        has `batch`, `loss` and `page`: position, samples, learning rates and norms of the step.

        Args:
            module: as of `fit`, and so are `data` and `val_dataloaders`.
            data: see above.
            val_dataloaders: see above.
            run: folder or URL of the run.
            step: number of the step, from 1. The replay starts from the newest snapshot before it.

        Raises:
            SnapshotMissing: no snapshot before `step` is kept.
        """
        if self.world.size > 1 or self.placement.start != "none":
            raise UserError(f"a script replays in one process; `midstride replay {run} --step {step}` starts several")
        source = open_run(run_url_of(run))
        with TemporaryDirectory(prefix="midstride-replay-") as folder:
            target = Store.open(f"{folder}/{Path(source.url).name}")
            fork(source, snapshot_before(source, step), target, is_temporary=True)
            replayed = StepReplay(ReplayPlan(folder, step, at_gradients=True), lambda: self.last_fit)
            faults, settings = self._faults, self.settings
            never = SnapshotOptions.model_validate({"every_steps": NEVER})
            once = settings.options.model_copy(update={"verify_every": None})
            self._faults, self.settings = replayed, replace(settings, options=once, snapshots=never, loggers=())
            try:
                with suppress(ReplayEnd):
                    self.fit(module, data, val_dataloaders, run=target.url)
            finally:
                self._faults, self.settings = faults, settings
            if not replayed.page:
                raise UserError(f"step {step} of {source.url} does not exist: the run ends with {self.progress.step}")
        yield replayed

    @on_all_ranks
    def validate(
        self, module: TrainingModule | None = None, data: Any = None, *, ckpt_path: str | os.PathLike[str] | None = None
    ) -> Results:
        """Validate `module`; return its logged values, reduced over batches and ranks.

        Arguments as for `test`.
        """
        with self._evaluation(cast("TrainingModule", module), data, "validate", ckpt_path) as resumables:
            return Results(EvaluationLoop(self.context, "validate", resumables).run())

    @on_all_ranks
    def test(
        self, module: TrainingModule | None = None, data: Any = None, *, ckpt_path: str | os.PathLike[str] | None = None
    ) -> Results:
        """Test `module`; return its logged values by name, reduced over batches and ranks.

        Args:
            module: the module to test; None for that of the last call, with the best weights of its run if there are.
            data: a DataModule, or one or several DataLoaders to test on; None if the module defines them.
            ckpt_path: "best" or "last" of the run fitted last, or the path of such a folder or of a file that
                `save_checkpoint` or `midstride export` wrote; None for the current weights.
        """
        fit = self.last_fit
        with self._evaluation(cast("TrainingModule", module), data, "test", ckpt_path) as resumables:
            values = Results(EvaluationLoop(self.context, "test", resumables).run())
        if fit is not None and (ckpt_path in ("best", "last") or module is fit.context.module):
            fit.tell_trackers(values)
        return values

    @on_all_ranks
    def predict(
        self,
        module: TrainingModule | None = None,
        data: Any = None,
        *,
        ckpt_path: str | os.PathLike[str] | None = None,
        return_predictions: bool | None = None,
    ) -> list[Any]:
        """Return outputs of `predict_step` for this rank's batches; one list per loader of several.

        Arguments as for `test`. With `ddp_spawn`, `ddp_fork` and `ddp_notebook` it returns the outputs of all ranks,
        rank by rank. With `return_predictions=False` outputs are dropped, and the lists are empty.
        """
        with self._evaluation(cast("TrainingModule", module), data, "predict", ckpt_path) as resumables:
            loop = PredictionLoop(self.context, resumables, keeps=return_predictions is not False)
            loop.run()
            return of_loaders(loop.predictions)

    def check(self, module: TrainingModule, data: Any = None, *, processes: int = 1) -> list[str]:
        """Return messages on errors that would stop a fit on `processes` before its first step.

        The check runs in this process, on a copy of this Trainer. You can call `fit` afterwards.
        """
        module = compile_in_place(module)
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
                refused += [fault for fault in meant.module_errors(module) if fault not in refused]
                fit = trial._fit_of(ready, trial._loaders(module, train=data), {})
                refused += fit.errors(meant)
                fit.check()
        except EngineError as error:
            return [*refused, str(error)]
        finally:
            attach(module, trainers[0] if trainers else None)
        return refused

    # Parts of a call --------------------------------------------------------------------------------

    def _module_errors(self, module: TrainingModule, data: object) -> list[str]:
        """Return messages on hooks, settings and existing layers that this Trainer does not support."""
        by_hand = not module.automatic_optimization
        faults = hook_faults(module, self.callbacks, data)
        if not any(hasattr(module, hook) for hook in _BUILDERS):
            faults += self.strategy.module_errors(module)
        if self.options.compile is not None and self.strategy.name in _NOT_COMPILED:
            faults.append(f"compile with strategy {self.strategy.name}, which calls copies or parts of the module")
        return [*faults, *self.context.precision.module_errors(by_hand=by_hand)]

    @contextmanager
    def _prepare(
        self, module: TrainingModule, data: Any, stage: str, ckpt_path: str | os.PathLike[str] | None = None
    ) -> Iterator[EvaluationContext]:
        """Start the process group, set up module and data for `stage`, load `ckpt_path`."""
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
        self.context = replace(self.context, module=module, hooks=Hooks(self, module, self.callbacks))
        self.loaders, self.given_loaders = None, {}
        self._datamodule = data if isinstance(data, DataModule) else None
        if isinstance(data, LightningData):
            attach(data, self)
        self.metric_logger.begin("train", closed="setup")
        compile_layers_in_place(module)
        anomalies = set_detect_anomaly(self.options.detect_anomaly or is_anomaly_enabled())
        prepared = set_up(self._owners(module), stage, self.strategy, self.heartbeat)
        with anomalies, running_call(self, module, stage), prepared:
            if refused := self.strategy.module_errors(module):
                raise JobError("\n".join(refused))
            compile_layers_in_place(module)
            if self.options.compile is not None:
                compile_module(module, self.options.compile)
            self.context = self._context_of(module, Progress() if stage == "fit" else self.progress)
            if ckpt_path is not None:
                self._load_weights(module, self.weights_url(ckpt_path))
            yield self.context

    @contextmanager
    def _errors_told(self, verb: str) -> Iterator[None]:
        """Call `on_exception` with an error of the block, from the call of `setup` on."""
        before = self.context
        try:
            yield
        except (Exception, KeyboardInterrupt) as error:
            if self.context is not before:
                self.context.hooks.call_on_exception(error, verb)
            raise

    @contextmanager
    def _evaluation(
        self, module: TrainingModule, data: Any, stage: EvaluationStage, ckpt_path: str | os.PathLike[str] | None
    ) -> Iterator[list[ResumableLoader]]:
        """Prepare an evaluation, with a copy of the counts of the last fit; yield its loaders."""
        preparing = self._prepare(module, data, stage, ckpt_path)
        with self._errors_told(stage), preparing as ready, closing(self._loaders(module, evaluate=data)) as loaders:
            resumables = setup_evaluation(ready, stage, loaders)
            self.given_loaders = loaders.given
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
        self.given_loaders = loaders.given
        apply_initial_sharding(self.loaders, earlier, ready.world.size)
        return Fit(ready, self.loaders, loaders.source)

    def _loaders(self, module: TrainingModule, *, train: Any = None, evaluate: Any = None) -> LoaderResolver:
        strategy = self.strategy
        seed, batch = self.settings.seed, self.settings.global_batch_size
        settings = LoaderSettings(strategy.data_world, self.options, seed, lanes_of(strategy), batch)
        return LoaderResolver(settings, self.strategy.collective, module, train=train, evaluate=evaluate)

    def _context_of(self, module: TrainingModule, progress: Progress) -> EvaluationContext:
        """Return the context of a call, and convert `module` to this Trainer's precision."""
        precision = Precision(self.options.precision, self.device)
        precision.convert(module)
        set_device(module, self.device)
        metric_logger = self._logger_of(module)
        return EvaluationContext(
            trainer=self,
            settings=self.settings,
            strategy=self.strategy,
            device=self.device,
            callbacks=self.callbacks,
            heartbeat=self.heartbeat,
            reporter=self.reporter,
            requests=self.requests,
            faults=self._faults,
            module=module,
            modes=TrainingModes(module),
            precision=precision,
            metric_logger=metric_logger,
            scope=StepScope(metric_logger, precision, self.heartbeat),
            hooks=Hooks(self, module, self.callbacks),
            progress=progress,
            finite_losses=FiniteLosses(progress, self.world.rank, needed=precision.name != "16"),
        )

    def _logger_of(self, module: TrainingModule) -> MetricLogger:
        gather, lanes = self.strategy.collective.gather, lanes_of(self.strategy)
        if lanes is not None:
            return LaneLogger(gather, LaneMetrics(module, gather, lanes), lanes)
        return MetricLogger(gather, TorchmetricsState(module, gather, self.world.size), self.world.size)

    def reset_callbacks(self) -> None:
        """Restore the states that callbacks had before their first fit."""
        for callback, state in zip(_counterparts(self._given), self._first_states, strict=True):
            keep_first_state(callback, state)
            state.restore(callback)

    def _pairs(self, callbacks: Any) -> list[tuple[Any, Callback | None]]:
        """Return pairs of a given callback and its counterpart; a trial run watches no values."""
        pairs = with_counterparts(callbacks, adapt)
        if not self.arguments["fast_dev_run"]:
            return pairs
        return [(given, None if isinstance(found, Monitor) else found) for given, found in pairs]

    def take_callbacks(self, module: TrainingModule) -> None:
        """Add the callbacks that `module` configures; each replaces a given callback of its class."""
        where = f"{type(module).__name__}.configure_callbacks"
        configured = self._pairs(call_user_code(where, module.configure_callbacks))
        kinds = {type(callback) for callback in _counterparts(configured)}
        self.callback_pairs = [*(pair for pair in self._given if type(pair[1]) not in kinds), *configured]
        self.callbacks = FixedCallbacks(_counterparts(self.callback_pairs))

    def weights_url(self, ckpt_path: str | os.PathLike[str]) -> str:
        """Return path or URL of weights.

        "best" and "last" are of the run fitted last (UserError without one).
        """
        if ckpt_path not in ("best", "last"):
            return os.fspath(ckpt_path)
        if self.run_url is None:
            raise UserError(f"ckpt_path={ckpt_path!r} is a folder of a run: fit with run=... first, or give a path.")
        return f"{self.run_url.rstrip('/')}/{ckpt_path}"

    def _load_weights(self, module: TrainingModule, url: str) -> None:
        strategy = self.strategy
        base: Callable[[], dict[str, Any]] = partial(full_state_dict, strategy, module)
        rows = 0, 1
        if isinstance(strategy, ShardsWeights):
            base, rows = module.state_dict, strategy.wanted_rows(module)
        weights = weights_at(url, rows)
        try:
            load_full_state_dict(strategy, module, weights.complete(base))
        except RuntimeError as error:  # torch's, which names each tensor
            raise UserError(_misfit(module, url, weights.facts.get("hparams", {}), error)) from error

    # For the process that starts the ranks of this Trainer: see `StartsRanks` -----------------------------

    def fitted_module(self, verb: str, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the last call's module, and `arguments` with its run's best weights, if any.

        Raises:
            UserError: there was no call, or `verb` is "fit".
        """
        if verb == "fit" or type(self.module) is TrainingModule:
            raise UserError(f"{verb} was given no module, and there is none of an earlier call: {verb}(module, ...)")
        is_free = arguments.get("ckpt_path") is None and self.run_url is not None
        if is_free and newest_weights(open_run(self.run_url or ""), "best") is not None:
            return self.module, {**arguments, "ckpt_path": "best"}
        return self.module, arguments

    def start_from(self, module: TrainingModule, ckpt_path: str | os.PathLike[str]) -> None:
        """Load the weights that a new run starts from; a run that resumes has its own."""
        self._load_weights(module, self.weights_url(ckpt_path))
        self.reporter.announce(f"a new run starts from the weights in {ckpt_path}; everything else starts over")

    def detach(self, module: Any, verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Detach `module` to send it to ranks; return the arguments of `verb` for them."""
        attach(module, None)
        if verb == "fit":
            self.reset_callbacks()
            return dict(arguments)
        folder = arguments.get("ckpt_path")
        return {**arguments, **({} if folder is None else {"ckpt_path": self.weights_url(folder)})}

    def export_result(self, built: ModuleStructure) -> dict[str, Any]:
        """Return the changes of a call, with tensors on the CPU, and weights on rank 0 only.

        Args:
            built: structure of the module before the call; hooks and training may have added layers.
        """
        module = self.context.module
        weights = described(module, module.state_dict()) if self.world.is_first else {}
        return {
            "structure": structure_of(built) if self.world.is_first else {},
            "weights": {name: it.cpu() if isinstance(it, Tensor) else it for name, it in weights.items()},
            "progress": self.progress.state_dict(),
            "logged": {name: state for name, state in self.metric_logger.state_dict().items() if name in _NEWEST},
            "callbacks": [callback.state_dict() for callback in self.callbacks],
            "run": self.run_url,
        }

    def adopt_result(self, module: Any, result: Mapping[str, Any], *, fitted: bool) -> None:
        """Restore the result of `export_result` into this Trainer and `module`.

        `fitted` if the call was `fit`.
        """
        self.context.precision.convert(module)
        take_weights(module, result["weights"], result["structure"])
        attach(module, self)
        self.context = replace(self.context, module=module)
        self.metric_logger.load_state_dict({**self.metric_logger.state_dict(), **result["logged"]})
        if not fitted:
            return
        self.run_url = result["run"]
        self.progress.load_state_dict(result["progress"])
        self.take_callbacks(module)
        for callback, state in zip(self.callbacks, result["callbacks"], strict=True):
            callback.load_state_dict(state)
        update_lightning_callbacks(self)

    def with_strategy(self, strategy: Strategy) -> Self:
        """Return a copy of this Trainer without a fit, with an attached `strategy`."""
        other = copy.copy(self)
        other.strategy, other.last_fit = strategy, None
        return other

    # For modules, hooks and callbacks, as `TrainerInterface` -------------------------------------------

    def set_by_users(self) -> dict[str, Any]:
        """Return the attributes that user code has set: they are part of snapshots."""
        return {name: value for name, value in vars(self).items() if name not in self._own}

    @property
    def world(self) -> World:
        """The rank of this process, and the number of all ranks."""
        return self.strategy.world

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.strategy.device

    @property
    def options(self) -> TrainerOptions:
        """Options of the training."""
        return self.settings.options

    @property
    def progress(self) -> Progress:
        """Counts of the run fitted last, or of an evaluation outside a fit while it runs."""
        return self.context.progress

    @property
    def metric_logger(self) -> MetricLogger:
        """The values that `self.log` got in the current or last call."""
        return self.context.metric_logger

    @property
    def precision(self) -> str:
        """The precision that the module computes in, by Lightning's name, such as "bf16-mixed"."""
        return next(name for name, short in LONG_PRECISIONS.items() if short == self.options.precision)

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers of the last fit; `on_fit_start` may set others."""
        return [] if self.last_fit is None else self.last_fit.context.optimizers

    @optimizers.setter
    def optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers[:] = optimizers

    @property
    def schedulers(self) -> list[SchedulerConfig]:
        """The learning rate schedulers of the last fit."""
        return [] if self.last_fit is None else self.last_fit.context.schedulers

    @property
    def module(self) -> TrainingModule:
        """The module of the current or last call."""
        return self.context.module

    @property
    def datamodule(self) -> DataModule | None:
        """The DataModule of the current or last call; None without one."""
        return self._datamodule

    @property
    def train_dataloader(self) -> Any:
        """The training loader of the fit, as it was given."""
        return self.given_loaders.get("train")

    @property
    def val_dataloaders(self) -> Any:
        """The validation loaders of the current or last call, as they were given."""
        return self.given_loaders.get("validate")

    @property
    def num_training_batches(self) -> int | None:
        """Training batches in an epoch; None if the number is unknown, 0 before a fit."""
        return 0 if self.loaders is None else self.loaders.training.estimated_batches

    @property
    def num_val_batches(self) -> list[int | None]:
        """Batches of each validation loader; None for an unknown number, [] without validations."""
        if self.loaders is None or not has_step(self.module, "validation_step"):
            return []
        return [loader.estimated_batches for loader in self.loaders.validation]

    @property
    def is_last_batch(self) -> bool:
        """Whether the current training batch is the last of its epoch."""
        return self.loaders is not None and self.loaders.training.at_end

    @property
    def callback_metrics(self) -> dict[str, float]:
        """The newest logged values by name, the same on every rank."""
        return self.metric_logger.values

    @property
    def estimated_stepping_batches(self) -> float:
        """Optimizer steps of the whole fit, for learning rate schedules; infinite if unknown."""
        options, batches = self.options, self.num_training_batches
        steps = math.inf if options.max_steps is None else options.max_steps
        if batches is None or options.max_epochs is None:
            return steps
        windows = (window_of(options, self.callbacks, epoch) for epoch in range(options.max_epochs))
        return min(steps, sum(math.ceil(batches / window) for window in windows))

    @property
    def current_epoch(self) -> int:
        """Epochs completed."""
        return self.progress.epoch

    @property
    def global_step(self) -> int:
        """Optimizer steps taken."""
        return self.progress.step

    @property
    def global_rank(self) -> int:
        """The rank of this process."""
        return self.world.rank

    @property
    def local_rank(self) -> int:
        """The rank of this process on its machine."""
        return self.world.local_rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.world.size

    @property
    def is_global_zero(self) -> bool:
        """Whether this process is rank 0."""
        return self.world.is_first

    def gather(self, value: object) -> list[Any]:
        """Return every rank's `value`, in the order of ranks."""
        return self.strategy.collective.gather(value)

    def clip_gradients(self, optimizer: Optimizer, largest: float, algorithm: Literal["norm", "value"]) -> None:
        """Clip the gradients of the parameters of `optimizer`, by norm or by value, to `largest`."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        strategy = self.strategy
        by_norm = strategy.clip_gradients if isinstance(strategy, ModelParallel) else clip_grad_norm_
        clip = by_norm if algorithm == "norm" else clip_grad_value_
        clip(parameters, largest)

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Run the backward pass of a finite `loss`, and average gradients over the ranks."""
        hooks, module, strategy = self.context.hooks, self.context.module, self.strategy
        self.context.finite_losses.check(loss)
        hooks.call("on_before_backward", loss)
        self.context.inject_fault("backward", None, loss)
        buckets = gradient_buckets(strategy)
        with nullcontext() if buckets is None else buckets.backward(module.parameters()):
            self.context.precision.backward(loss, own_hook(module, "backward") or Tensor.backward, **options)
        strategy.reduce_gradients(module.parameters())
        hooks.call("on_after_backward")

    def step_optimizer(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Step `optimizer` in manual optimization, after `closure` and `on_before_optimizer_step`."""
        hooks = self.context.hooks
        if not hooks.has("on_before_optimizer_step"):
            return optimizer.step(**options) if closure is None else optimizer.step(closure, **options)

        def evaluated() -> Any:
            returned = None if closure is None else closure()
            hooks.call("on_before_optimizer_step", optimizer)
            return returned

        return optimizer.step(evaluated, **options)

    def save_weights(self, folder: Literal["best", "last"]) -> None:
        """Save the module's weights to `folder` of the run, in a fit with snapshots.

        Every rank calls this.
        """
        if self.is_fitting and self.last_fit is not None:
            self.last_fit.save_weights(folder)

    def save_checkpoint(self, filepath: str | os.PathLike[str], weights_only: bool = True) -> None:
        """Write the weights to a file that `load_from_checkpoint` of a LightningModule can read."""
        checkpoint = exported_checkpoint(self.module, full_state_dict(self.strategy, self.module))
        if self.world.is_first:
            path = Path(filepath)
            path.parent.mkdir(parents=True, exist_ok=True)
            with draft_of(path) as draft:
                torch.save(checkpoint, draft)

    def stop(self, ending: Ending | None = None) -> None:
        """Request the end of the fit after the current batch or epoch.

        Every rank calls this at the same point.

        Args:
            ending: why, for reports; by default that a callback stopped it.
        """
        self.progress.request_stop(ending or STOPPED_BY_CALLBACK)

    if not TYPE_CHECKING:  # static type checkers would accept any attribute

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return getattr(LightningTrainer(self), name)

        def __setattr__(self, name: str, value: Any) -> None:
            is_fixed = name == "callbacks" and not isinstance(value, FixedCallbacks)
            if is_fixed or name == "should_stop" or name in TrainerOptions.model_fields:
                setattr(LightningTrainer(self), name, value)  # stops the fit, or raises an error with advice
            else:
                super().__setattr__(name, value)


def _misfit(module: TrainingModule, url: str, theirs: Mapping[str, Any], error: Exception) -> str:
    """Return the message on weights, made with arguments `theirs`, that `module` does not take."""
    head, ours = f"the weights of {url} do not fit {type(module).__name__}", module.hparams
    differ = {name: value for name, value in theirs.items() if name in ours and ours[name] != value}
    if not differ:
        return f"{head}: {error}"
    both = [
        f"{name} is {format_value(name, value)} there, {format_value(name, ours[name])} here"
        for name, value in differ.items()
    ]
    remedy = " ".join(f"--set module_args.{name}={value}" for name, value in differ.items())
    return f"{head}: {', '.join(both)}. Give the module their arguments: for a job, {remedy}\n{error}"


def _counterparts(pairs: Sequence[tuple[Any, Callback | None]]) -> list[Callback]:
    return [callback for _, callback in pairs if callback is not None]
