"""`Resumable`: a `transformers.Trainer` whose training is a `Loop`.

No other file names privates of transformers.

An optimizer step is a batch of the loop, and an epoch one of its epochs. So boundaries are where the Trainer asks for
the batches of its next step: after logs, evaluation and checkpoints of the last one.
"""

import copy
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset

from midstride.engine.code_origin import is_user_class
from midstride.engine.config.options import SnapshotOptions
from midstride.engine.errors import NotExact, UserError
from midstride.engine.huggingface.windows import window_loader
from midstride.engine.loop.feeds import LoopLoader
from midstride.engine.loop.liveness import attributes_set_in
from midstride.engine.loop.loop import Loop
from midstride.engine.metrics.values import OF_TIME
from midstride.engine.seeds import Generators

__all__ = ["Resumable", "TrainerParts"]

log = logging.getLogger(__name__)

if TYPE_CHECKING:

    class _Trainer:
        """The parts of `transformers.Trainer` that `Resumable` uses."""

        args: Any
        state: Any
        control: Any
        model: Any
        optimizer: Any
        lr_scheduler: Any
        accelerator: Any
        callback_handler: Any
        is_in_train: bool
        _train_batch_size: int
        _get_num_items_in_batch: Any

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
        def train(self, *args: Any, **kwargs: Any) -> Any: ...
        def log(self, *args: Any, **kwargs: Any) -> Any: ...
        def _init_training_state(self, *args: Any, **kwargs: Any) -> Any: ...
        def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any: ...
        def _run_epoch(self, *args: Any, **kwargs: Any) -> Any: ...
        def _evaluate(self, *args: Any, **kwargs: Any) -> Any: ...
        def _finalize_training(self, *args: Any, **kwargs: Any) -> Any: ...
else:
    _Trainer = object

#: attributes of a TrainerState that training changes
_STATE = (
    "epoch",
    "global_step",
    "num_input_tokens_seen",
    "total_flos",
    "log_history",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
_CONTROL = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
#: sums and counts of a Trainer itself, which `train` sets at its start
_COUNTS = (
    "_tr_loss",
    "_total_loss_scalar",
    "_globalstep_last_logged",
    "_initial_global_step",
    "_initial_num_input_tokens_seen",
    "current_flos",
)
#: the same of TRL's Trainers, in addition to the values in `_metrics` that they log next
_COUNTS_OF_TRL = ("_total_train_tokens",)


class TrainerParts:
    """State, control, sums and callbacks of a `transformers.Trainer` as a part of snapshots.

    Args:
        trainer: the Trainer.
    """

    def __init__(self, trainer: Any) -> None:
        #: the object whose state this is, with all attributes that the user's classes set
        self.owner, self.own_names = trainer, _own_names(type(trainer))
        self._trainer = trainer
        self._loaded: dict[str, Any] | None = None
        #: step, loss and metrics of a training that has ended
        self.output: list[Any] | None = None

    def _objects(self) -> dict[str, tuple[Any, Sequence[str]]]:
        trainer = self._trainer
        found: dict[str, tuple[Any, Sequence[str]]] = {
            "state": (trainer.state, _STATE),
            "control": (trainer.control, _CONTROL),
            "sums": (trainer, _COUNTS),
        }
        if counts := [name for name in _COUNTS_OF_TRL if hasattr(trainer, name)]:
            found["sums of TRL"] = trainer, counts
        for number, callback in enumerate(trainer.callback_handler.callbacks):
            state: Callable[[], dict[str, Any]] | None = getattr(callback, "state", None)
            if callable(state) and not is_user_class(type(callback)):
                found[f"callback {number} {type(callback).__name__}"] = callback, [*state()["attributes"]]
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return all values by object and name."""
        values = {
            name: {key: copy.deepcopy(getattr(one, key, None)) for key in keys}
            for name, (one, keys) in self._objects().items()
        }
        logged = {mode: dict(found) for mode, found in self._logged().items()}
        return {**values, "logged": copy.deepcopy(logged), "output": self.output}

    def _logged(self) -> dict[str, Any]:
        """Return the values that a Trainer of TRL logs next, by mode and name."""
        found: dict[str, Any] = getattr(self._trainer, "_metrics", {})
        return found

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore all values."""
        self.output, self._loaded = state_dict["output"], state_dict
        for mode, found in self._logged().items():
            found.clear()
            found.update(copy.deepcopy(state_dict["logged"].get(mode, {})))
        for name, (one, _) in self._objects().items():
            for key, value in state_dict.get(name, {}).items():
                setattr(one, key, copy.deepcopy(value))

    def load_again(self) -> None:
        """Restore them once more, after the Trainer has set its sums at the start of an attempt."""
        if self._loaded is not None:
            self.load_state_dict(self._loaded)
            self._loaded = None

    def end(self, output: list[Any]) -> None:
        """Take the output of a training that has ended."""
        self.output = output


def _own_names(kind: type) -> frozenset[str]:
    """Return the attributes that the user's classes in a Trainer set, and no library's."""
    own, others = set[str](), set[str]()
    for one in kind.__mro__:
        (own if is_user_class(one) else others).update(attributes_set_in(one))
    return frozenset(own - others)


class _EpochsTrained:
    """Number of trained epochs: taken before the state is restored, and used after it."""

    def __init__(self, trainer: "Resumable") -> None:
        self._trainer = trainer

    def __index__(self) -> int:
        return self._trainer.epochs_trained


class _LoopOfTrainer(Loop):
    """The loop of a Trainer, which gives all processes the same seed."""

    seeds_apart = False


class Resumable(_Trainer):
    """Mixin that makes a `transformers.Trainer` resume exactly.

    Write `class MyTrainer(Resumable, transformers.Trainer)`, or `trl.SFTTrainer` in its place.

    Args:
        args: arguments of the Trainer.
        run: folder or URL of the run; the same `run` again resumes it. The script of a job leaves it out.
        snapshots: when to write the whole state, such as {"every_seconds": 60}.
        resume: as of `Loop`.
        loggers: as of `Loop`; they get each row of the log exactly once.
        accept_change: as of `Loop`.
        kwargs: further arguments of the Trainer.
    """

    def __init__(
        self,
        *args: Any,
        run: str | None = None,
        snapshots: SnapshotOptions | Mapping[str, Any] | None = None,
        resume: Any = "auto",
        loggers: Sequence[Any] = (),
        accept_change: str | Collection[str] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        chosen = {} if snapshots is None else {"snapshots": snapshots}
        self._loop_options: dict[str, Any] = {
            "resume": resume,
            "loggers": loggers,
            "accept_change": accept_change,
            **chosen,
        }
        self._run_of_loop: str | None = run
        self._loop: Any = None

    def train(
        self, resume_from_checkpoint: Any = None, trial: Any = None, ignore_keys_for_eval: list[str] | None = None
    ) -> Any:
        """Train to the end, from the run's newest snapshot if there is one.

        Arguments and result are those of the Trainer.

        Raises:
            UserError: `resume_from_checkpoint` is given.
            NotExact: the Trainer uses what cannot be resumed exactly.
        """
        if resume_from_checkpoint:
            raise UserError("train(resume_from_checkpoint=...): the run resumes from its own snapshots; leave it out")
        if faults := [*_unsupported(self, trial)]:
            raise NotExact(
                f"Resumable does not resume exactly with {', and '.join(faults)}. Leave that out, or train the model "
                "in a TrainingModule, whose strategies also shard weights"
            )
        drawn = Generators().state_dict()
        accelerator = "cpu" if self.args.device.type == "cpu" else "gpu"
        loop = _LoopOfTrainer(
            self._run_of_loop,
            seed=self.args.seed,
            accelerator=accelerator,
            enable_progress_bar=False,
            **self._loop_options,
        )
        Generators().load_state_dict(drawn)  # the Trainer has seeded them when it was built
        self._loop, self._parts, self._epochs = loop, TrainerParts(self), iter(range(0))
        self._is_over = False
        try:
            return super().train(None, trial, ignore_keys_for_eval)
        finally:
            loop.close()

    @property
    def epochs_trained(self) -> int:
        """Number of trained epochs."""
        return int(self.state.num_train_epochs) if self._is_over else self._epoch

    # What the Trainer calls -----------------------------------------------------------------------------

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[Any, int]:
        super()._init_training_state(*args, **kwargs)
        return _EpochsTrained(self), 0

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        """Build optimizer and schedule, keep them and all else, and restore the snapshot."""
        model, loader = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        first = _callback_of(self)
        self.callback_handler.callbacks[:] = [first, *self.callback_handler.callbacks]
        self._window = self.args.gradient_accumulation_steps
        self._source, size = train_dataloader, self._train_batch_size
        _make_generator(train_dataloader)
        self._windows = self._loop.loader(window_loader(train_dataloader, size, self._window))
        scaler = getattr(self.accelerator, "scaler", None)
        own = [one for one in self.callback_handler.callbacks if is_user_class(type(one))]
        self._loop.keep(
            model=model,
            optimizer=self.optimizer,
            scheduler=self.lr_scheduler,
            trainer=self._parts,
            **({} if scaler is None else {"scaler": scaler}),
            **({"callbacks": own} if own else {}),
        )
        self._epochs = self._loop.epochs(int(self.state.num_train_epochs))
        self._advance()
        self.callback_handler.train_dataloader = self._windows
        return model, loader

    def _advance(self) -> None:
        """Begin the next epoch of the loop, or continue that of a snapshot."""
        self._epoch = next(self._epochs, -1)
        self._is_over = self._epoch < 0

    def _run_epoch(
        self, *, epoch: int, steps_in_epoch: int, num_update_steps_per_epoch: int, train_dataloader: Any, **rest: Any
    ) -> None:
        """Train the rest of an epoch."""
        feed = self._windows.feed
        resumed, done = feed.continues, feed.batch if feed.continues else 0
        self._parts.load_again()
        self._steps_in_epoch, self._epoch_number = steps_in_epoch, epoch
        passing = iter(self._windows)
        if resumed and feed.at_end:  # it died after the end of the epoch
            self._end_epoch(passing, epoch)
            return
        if not resumed:
            _begin_pass(self._source, epoch)
        super()._run_epoch(
            epoch=epoch,
            steps_in_epoch=steps_in_epoch - done * self._window,
            num_update_steps_per_epoch=num_update_steps_per_epoch - done,
            train_dataloader=_Once(self._windows, passing),
            **rest,
        )
        if not feed.at_end:
            self._loop.end_pass()
        self._end_epoch(passing, epoch)

    def _end_epoch(self, passing: Any, epoch: int) -> None:
        """Take the boundary of the last step, and begin the next epoch if there is one."""
        if self._windows.feed.at_end:
            next(passing, None)
        else:
            passing.close()
        self._parts.load_again()
        if epoch + 1 < int(self.state.num_train_epochs):
            if self.control.should_training_stop:
                self._loop.stop()
            else:
                self._advance()

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """Return the batches of an optimizer step, and the number of their items or None."""
        batches: list[Any] = next(epoch_iterator, [])
        self._parts.load_again()
        return batches, self._get_num_items_in_batch(batches, device)

    def epoch_of_step(self) -> float:
        """Return the epoch with its fraction, after the current step."""
        steps = min(self._windows.feed.batch * self._window, self._steps_in_epoch)
        return float(self._epoch_number + steps / self._steps_in_epoch)

    def _evaluate(self, trial: Any, ignore_keys_for_eval: Any, skip_scheduler: bool = False) -> Any:
        if skip_scheduler and self.state.global_step:  # the evaluation at the start of a training that was resumed
            return {}
        return super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Log values as the Trainer does, and to the metric log of the run, except for times."""
        super().log(logs, start_time)
        if not self.is_in_train:
            return
        for name, value in logs.items():
            if name != "epoch" and isinstance(value, (int, float)) and not name.endswith(OF_TIME):
                self._loop.log(name, value)

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: float) -> Any:
        """Log the totals and load the best model, once; then commit the end of the run."""
        from transformers.trainer_utils import TrainOutput

        self._parts.load_again()
        if self._is_over and self._parts.output is not None:
            self.is_in_train = False
            return TrainOutput(*self._parts.output)
        output = super()._finalize_training(trial, num_train_samples, start_time)
        self._parts.end([output.global_step, output.training_loss, dict(output.metrics)])
        while not self._is_over:
            self._advance()
        return output


class _Once:
    """A loader whose one iterator has begun."""

    def __init__(self, loader: LoopLoader, iterator: Iterator[Any]) -> None:
        self._loader, self._iterator = loader, iterator

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return self._iterator


def _begin_pass(loader: Any, epoch: int) -> None:
    """Set the epoch of a loader, and draw the number that torch's loaders draw in a new pass."""
    inner: Any = getattr(getattr(loader, "batch_sampler", None), "batch_sampler", None)
    for one in (loader, inner):
        if hasattr(one, "set_epoch"):
            one.set_epoch(epoch)
    torch.empty((), dtype=torch.int64).random_(generator=getattr(loader, "generator", None))


def _make_generator(loader: Any) -> None:
    """Make the generator of accelerate's sampler, which makes it when it is first run."""
    sampler: Any = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    if hasattr(sampler, "initial_seed") and getattr(sampler, "generator", None) is None:
        setattr(sampler, "generator", torch.Generator().manual_seed(sampler.initial_seed))  # noqa: B010


def _callback_of(trainer: Resumable) -> Any:
    """Return a callback that sets the epoch of the state after each step."""
    from transformers import TrainerCallback

    def on_step_end(self: Any, args: Any, state: Any, control: Any, **_: Any) -> None:
        setattr(state, "epoch", trainer.epoch_of_step())  # noqa: B010  # an attribute of the Trainer's

    return type("EpochOfStep", (TrainerCallback,), {"on_step_end": on_step_end, "__module__": __name__})()


def _unsupported(trainer: Any, trial: Any) -> Iterator[str]:
    """Yield features in use by a Trainer that do not resume exactly."""
    args, shares = trainer.args, getattr(trainer.args, "accelerator_config", None)
    named = {
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "FSDP by accelerate": trainer.is_fsdp_enabled,
        "weights that transformers shards": getattr(trainer, "is_distributed_loading_by_transformers", False),
        "parallelism_config": getattr(args, "parallelism_config", None) is not None,
        f"DataParallel on {args.n_gpu} GPUs": args.n_gpu > 1,
        "auto_find_batch_size": args.auto_find_batch_size,
        "a search of hyperparameters": trial is not None,
        "an IterableDataset": isinstance(trainer.train_dataset, IterableDataset),
        "a Trainer that generates its samples": hasattr(trainer, "_buffered_inputs"),
        "batches that the sampler balances": getattr(args, "train_sampling_strategy", "") == "batch_rebalance",
        "split_batches": getattr(shares, "split_batches", False),
        "dispatch_batches": getattr(shares, "dispatch_batches", False),
        "even_batches=False": args.world_size > 1 and not getattr(shares, "even_batches", True),
    }
    yield from (name for name, is_used in named.items() if is_used)
    if args.report_to:
        log.warning(
            "report_to %s: after an interruption these trackers get rows a second time. Use loggers= of Resumable, "
            "which sends each row once",
            ", ".join(args.report_to),
        )
