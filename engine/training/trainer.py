"""The Trainer: puts the parts of a training together and hands them to the loops."""

import copy
import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from midstride.engine.config.options import SnapshotOptions, TrainerOptions, checked_options, short_precision
from midstride.engine.data.resolve import Loaders
from midstride.engine.errors import EngineError, JobError, UserError
from midstride.engine.fault_injection import FaultPlan
from midstride.engine.metrics.logger import Logged
from midstride.engine.metrics.torchmetrics_state import Metrics
from midstride.engine.modules.callbacks import Callback
from midstride.engine.modules.hooks import Hooks, unheard
from midstride.engine.modules.module import DataModule, TrainingModule, ensure_module
from midstride.engine.modules.module_state import Modes
from midstride.engine.modules.progress import Progress
from midstride.engine.optim.optimizers import SchedulerConfig
from midstride.engine.optim.precision import Precision
from midstride.engine.ranks.dispatch import in_every_rank
from midstride.engine.ranks.placement import UNSAID, Machine, Wishes, place
from midstride.engine.ranks.subprocess_script import tie_to_first_rank
from midstride.engine.seeds import seed_everything
from midstride.engine.session.heartbeat import Heartbeat, Phase
from midstride.engine.session.signals import Requests
from midstride.engine.snapshots.weights import weights_at
from midstride.engine.strategies import build_strategy
from midstride.engine.strategies.base import Strategy
from midstride.engine.training.checkpointing.checkpointer import Recorder
from midstride.engine.training.checkpointing.run_store import Resume
from midstride.engine.training.determinism import Determinism
from midstride.engine.training.evaluation import evaluate, predict
from midstride.engine.training.fit import Fit, recall
from midstride.engine.training.loops import FitLoop
from midstride.engine.training.reporter import Reporter
from midstride.engine.training.sample_log import SampleAccount
from midstride.engine.trees import move
from midstride.engine.user_code import call_user_code
from midstride.engine.world import World

__all__ = ["Trainer"]

log = logging.getLogger(__name__)
_DEFAULT = SnapshotOptions.model_validate({})


def _given_options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `TrainerOptions` among the Trainer's `arguments` that are not left at their default."""
    defaults = Trainer.__init__.__kwdefaults__ or {}
    return {name: arguments[name] for name in TrainerOptions.model_fields if arguments[name] is not defaults[name]}


class Trainer:
    """Trains, validates, tests and predicts; resumes exactly.

    Args:
        strategy: a name from `midstride.engine.strategies.STRATEGIES`, "package.module:Class" or an instance of
            your own; by default "ddp" on several devices and "single" on one.
        strategy_args: its options, such as {"static_graph": True}.
        devices: on each machine: a number, "auto" for all GPUs or else the CPU, or a list of GPUs; by default one.
        gpus: GPUs by number, -1 for all, a list or text of indices; None and 0 are the CPU.
        tpu_cores: 1, 8, or the index of one in a list; with strategy "xla", which it implies.
        num_nodes: machines, to be checked against what the launcher started.
        auto_select_gpus: take so many free GPUs.
        snapshots: when the whole state is written; None for never.
        callbacks: what acts beside the module.
        seed: of everything random. Build the Trainer before the module: it seeds every rank alike.
        accept_change: keys of a run's identity that may differ from its snapshot's.
        identity: what else makes this run this run, for callers that build the module themselves.
        max_epochs: passes over the data; 1000 if neither this nor `max_steps` is given.
        max_steps: optimizer steps.
        precision: of the arithmetic: "32", "64", or mixed "bf16" or "16".
        accumulate_grad_batches: batches that make one optimizer step.
        gradient_clip_val: largest norm (or value) of the gradients.
        gradient_clip_algorithm: "norm" or "value".
        on_nan: a loss that is not finite ends the run ("fail"), or its batch is left out on every rank ("skip").
        val_check_interval: a share of an epoch (0.5) or a number of batches (100).
        limit_train_batches: a share of the batches (0.1) or a number (10); so are those of evaluations.
        limit_val_batches: of each validation loader.
        limit_test_batches: of each test loader.
        rng: random numbers in the data: of each sample ("lazy"), or one seed for a whole "batch".
        use_distributed_sampler: give each rank its own samples.
        deterministic: only repeatable algorithms; on when snapshots are on.
        collective_timeout_s: seconds for which ranks wait in training for one that does not answer; then they fail.
        enable_progress_bar: show one on a terminal.
        others: names of other frameworks and versions, which are answered by what they are here.

    Raises:
        JobError: with every fault of the arguments at once.
    """

    def __init__(
        self,
        *,
        strategy: str | Strategy | None = None,
        strategy_args: Mapping[str, Any] | None = None,
        devices: int | str | Sequence[int] | None = None,
        gpus: int | str | Sequence[int] | None = UNSAID,
        tpu_cores: int | str | Sequence[int] | None = None,
        num_nodes: int | None = None,
        auto_select_gpus: bool = False,
        snapshots: SnapshotOptions | Mapping[str, Any] | None = _DEFAULT,
        callbacks: Sequence[Callback] = (),
        seed: int = 0,
        accept_change: Collection[str] = (),
        identity: Mapping[str, Any] | None = None,
        max_epochs: int | None = None,
        max_steps: int | None = None,
        precision: Literal["32", "64", "bf16", "16"] | str | int = "32",
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: Literal["norm", "value"] = "norm",
        on_nan: Literal["fail", "skip"] = "fail",
        val_check_interval: int | float = 1.0,
        limit_train_batches: int | float = 1.0,
        limit_val_batches: int | float = 1.0,
        limit_test_batches: int | float = 1.0,
        rng: Literal["lazy", "batch"] = "lazy",
        use_distributed_sampler: bool = True,
        deterministic: bool | None = None,
        collective_timeout_s: float = 600.0,
        enable_progress_bar: bool = True,
        **others: Any,
    ) -> None:
        options = {**_given_options(locals()), **others}
        tie_to_first_rank()
        #: how this Trainer was made, for ranks that make another like it on their own devices
        self.settings: dict[str, Any] = {"strategy": strategy, "strategy_args": strategy_args, "callbacks": callbacks}
        self.settings |= {"seed": seed, "accept_change": accept_change, "identity": identity}
        self.settings |= {"snapshots": snapshots, **options}
        wishes = Wishes(
            *(strategy, strategy_args or {}, devices, gpus, num_nodes, auto_select_gpus),
            *(short_precision(precision), tpu_cores),
        )
        self.placement, faults = place(wishes, Machine.here())
        self.options, self.snapshots = checked_options(options, snapshots, faults)
        self.strategy, self.world = self.placement.strategy, self.placement.world
        self.device = self.strategy.device
        self.seed, self.accept_change, self.identity = seed, tuple(accept_change), dict(identity or {})
        self.callbacks = list(callbacks)
        self._pristine = [copy.deepcopy(callback.state_dict()) for callback in self.callbacks]
        self._faults, self.requests = FaultPlan.from_environment(), Requests()
        self.heartbeat = Heartbeat.of(self.world)
        self.reporter = Reporter(self.world, bar=self.options.enable_progress_bar)
        #: whether a fit is under way; an evaluation on its own moves no monitor
        self.is_fitting = False
        #: the run that was fitted last, and the loop it was trained in
        self.run_url: str | None = None
        self.loop: FitLoop | None = None
        self._take(TrainingModule())
        self._start_over()
        seed_everything(seed)

    # What a user calls --------------------------------------------------------------------------

    @in_every_rank
    def fit(
        self,
        module: TrainingModule,
        data: Any = None,
        val_dataloaders: Any = None,
        *,
        run: str | os.PathLike[str] | None = None,
        resume: Resume = "auto",
    ) -> None:
        """Train `module` on `data` to the end, from the newest good snapshot of `run` if there is one.

        Args:
            module: what to train.
            data: a DataModule, or a training DataLoader or nest of them; None if the module has the loaders itself.
            val_dataloaders: to validate on, one or several; by default those of the DataModule, or of the module.
            run: folder or fsspec URL of the run; the same one again resumes. None keeps nothing.
            resume: "auto", "never" (start over in the same folder), or the step of a snapshot.
        """
        if resume not in ("auto", "never") and type(resume) is not int:
            raise UserError(f'resume={resume!r}: "auto", "never" or the step of a snapshot, a number, is needed')
        run = None if run is None else os.fspath(run)
        kept = run is not None and self.snapshots is not None
        with self._ready(module, data, "fit"), Determinism(self.options.deterministic, on=kept):
            self._start_over()
            self.reset_callbacks()
            try:
                self.is_fitting = True
                recall(self, run, resume)
                Fit(self, Loaders(self, module, train=data, evaluate=val_dataloaders)).run(run, resume)
            finally:
                self.is_fitting = False
                self.reporter.close()

    @in_every_rank
    def validate(self, module: TrainingModule, data: Any = None, *, ckpt_path: str | None = None) -> dict[str, float]:
        """Return the reduced values of a validation; `ckpt_path` as in `test`."""
        with self._ready(module, data, "validate", ckpt_path):
            return evaluate(self, "validate", data)

    @in_every_rank
    def test(self, module: TrainingModule, data: Any = None, *, ckpt_path: str | None = None) -> dict[str, float]:
        """Return the reduced values of a test.

        Args:
            module: what to test.
            data: a DataModule, or one or several DataLoaders to test on; None if the module has them itself.
            ckpt_path: "best" or "last" of the run just fitted, or the path of such a folder; None for the
                module as it is.
        """
        with self._ready(module, data, "test", ckpt_path):
            return evaluate(self, "test", data)

    @in_every_rank
    def predict(self, module: TrainingModule, data: Any = None, *, ckpt_path: str | None = None) -> list[Any]:
        """Return what `predict_step` returns for every batch of this rank; `ckpt_path` as in `test`.

        With `ddp_spawn` and its kin, those of rank 0 come first, then those of rank 1, and so on.
        """
        with self._ready(module, data, "predict", ckpt_path):
            return predict(self, data)

    def check(self, module: TrainingModule, data: Any = None, *, processes: int = 1) -> list[str]:
        """Return what would stop a fit on so many processes before its first step, tried in this one alone.

        It is tried on a copy: this Trainer stays what it is, and may fit afterwards.
        """
        trial, meant, trainers = copy.copy(self), copy.copy(self.strategy), module._trainer
        meant.attach(World(size=processes, local_size=processes), self.strategy.devices)
        trial.strategy = meant
        refused = trial._refusals(module)
        trial.strategy, trial.world = build_strategy("single"), World()
        trial.strategy.attach(trial.world, meant.devices)
        trial._start_over()
        try:
            with trial._ready(module, data, "fit"):
                fit = Fit(trial, Loaders(trial, module, train=data))
                refused += fit.mismatches(meant)
                fit.check()
        except EngineError as error:
            return [*refused, str(error)]
        finally:
            module._trainer = trainers
        return refused

    # What loops, hooks and callbacks call ---------------------------------------------------------

    @property
    def callback_metrics(self) -> dict[str, float]:
        """The newest logged values by name, alike on every rank."""
        return self.logged.values

    def received(self, batch: Any) -> Any:
        """Return `batch` on this rank's device, in the width that the module trains in."""
        return self.precision.batch(move(batch, self.device))

    def strike(self, phase: str, step: int | None = None) -> None:
        """Let an injected fault strike here; `step` if it is not that of the progress."""
        if self._faults is not None:
            self._faults.at(self.world.rank, self.progress.step if step is None else step, phase)

    def check_finite(self, loss: Tensor) -> None:
        """Refuse to go on from a loss that is not finite."""
        if self.loop is not None:
            self.loop.optimization.losses.check_finite(loss)

    def save_weights(self, folder: Literal["best", "last"]) -> None:
        """Keep the module's weights in the run's folder, if there is a run; every rank calls this."""
        if self.recorder is not None:
            self.recorder.save_weights(folder)

    def reset_callbacks(self) -> None:
        """Let callbacks stand where they stood when they were given: nothing of an earlier fit goes on."""
        for callback, state in zip(self.callbacks, self._pristine, strict=True):
            callback.load_state_dict(copy.deepcopy(state))

    def weights_url(self, ckpt_path: str) -> str:
        """Return where the weights called `ckpt_path` are: "best" and "last" are those of the run fitted last."""
        if ckpt_path not in ("best", "last"):
            return ckpt_path
        if self.run_url is None:
            raise UserError(f"ckpt_path={ckpt_path!r} is a folder of a run: fit with run=... first, or give a path.")
        return f"{self.run_url.rstrip('/')}/{ckpt_path}"

    # Putting together -----------------------------------------------------------------------------

    def _refusals(self, module: TrainingModule) -> list[str]:
        """Return messages on what `module` wants and this Trainer cannot do."""
        by_hand = not module.automatic_optimization
        strange = unheard(module, self.callbacks)
        return [*strange, *self.strategy.refusals(module), *self.precision.refusals(by_hand=by_hand)]

    @contextmanager
    def _ready(self, module: TrainingModule, data: Any, stage: str, ckpt_path: str | None = None) -> Iterator[None]:
        """Meet the other ranks and get module and data ready for `stage`, with the weights at `ckpt_path` if given."""
        ensure_module(module, stage)
        if refused := self._refusals(module):
            raise JobError("\n".join(refused))
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.reporter.emit("imported")
        self.strategy.init_process_group()
        self.device = self.strategy.device
        self.reporter.emit("met")
        # Whatever setup draws is the same on every rank and in every life.
        seed_everything(self.seed, self.strategy.generator)
        module._trainer = [self]
        with self._set_up([data, module] if isinstance(data, DataModule) else [module], stage):
            self._take(module)
            if ckpt_path is not None:
                self.strategy.load_weights(module, weights_at(self.weights_url(ckpt_path)).state_dict)
            yield

    @contextmanager
    def _set_up(self, owners: Sequence[Any], stage: str) -> Iterator[None]:
        """Prepare data once on each machine, set up in every rank, and take down again what went well."""

        def call(name: str, *arguments: str) -> None:
            for owner in owners:
                if (method := getattr(owner, name, None)) is not None:
                    call_user_code(f"{type(owner).__name__}.{name}", method, *arguments)

        if stage == "fit" and self.world.local_rank == 0:
            with self.heartbeat.during(Phase.WAITING):
                call("prepare_data")
        self.strategy.gather(None)
        call("setup", stage)
        yield
        call("teardown", stage)

    def _take(self, module: TrainingModule) -> None:
        """Make what belongs to `module`."""
        self.module: TrainingModule = module
        self.precision = Precision(self.options.precision, self.device)
        self.precision.convert(module)
        module.device = self.device
        metrics = Metrics(module, self.strategy.gather, self.world.size)
        self.logged = Logged(self.strategy.gather, metrics, self.world.size)
        self.hooks = Hooks(self, module, self.callbacks)
        self.modes = Modes(module)

    def _start_over(self) -> None:
        """Stand where nothing has been trained yet."""
        readers = self.strategy.readers
        self.progress, self.samples = Progress(), SampleAccount(readers.rank, readers.size)
        self.wrapped: nn.Module = self.module
        self.optimizers: list[Optimizer] = []
        self.schedulers: list[SchedulerConfig] = []
        self.recorder: Recorder | None = None
