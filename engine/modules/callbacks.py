"""Callbacks: objects with hooks and state of their own, called beside the module's hooks."""

import copy
import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor

from midstride.engine.errors import UserError
from midstride.engine.metrics.values import number

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from midstride.engine.modules.interface import TrainerInterface
    from midstride.engine.modules.module import TrainingModule

__all__ = [
    "Callback",
    "FirstState",
    "FixedCallbacks",
    "LearningRateMonitor",
    "TrainedWeights",
    "first_state",
    "keep_first_state",
]


class Callback:
    """Base class of callbacks; a hook that is not overridden costs nothing.

    A callback that depends on earlier calls overrides `state_dict` and `load_state_dict`.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return all state that affects later calls of this callback."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore the state that `state_dict` returned."""

    def trainer_view(self, trainer: "TrainerInterface") -> Any:
        """Return the hooks' `trainer`. Adapters, as for Lightning's callbacks, return a view."""
        return trainer

    def evaluated_weights(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Return the weights for `best` and `last`: those given, or those of validations."""
        return weights

    def on_fit_start(self, trainer: "TrainerInterface", module: "TrainingModule") -> None:
        """At the start of `fit`, in every attempt, before the state of a snapshot is restored."""

    def on_fit_end(self, trainer: "TrainerInterface", module: "TrainingModule") -> None:
        """At the end of `fit`, once everything is written."""

    def on_train_start(self, trainer: "TrainerInterface", module: "TrainingModule") -> None:
        """After `on_fit_start`; the state of a snapshot is restored after it."""

    def on_train_end(self, trainer: "TrainerInterface", module: "TrainingModule") -> None:
        """Called after the last epoch, in each attempt that reaches it.

        Its changes are in `last`, not in snapshots.
        """

    def on_train_epoch_start(self, trainer: "TrainerInterface", module: "TrainingModule") -> None:
        """Before the first batch of an epoch; not again if a run resumes within it."""

    def on_train_epoch_end(self, trainer: "TrainerInterface", module: "TrainingModule") -> None:
        """After the last batch of an epoch, and the validation that follows it."""

    def on_train_batch_start(
        self, trainer: "TrainerInterface", module: "TrainingModule", batch: Any, batch_idx: int
    ) -> None:
        """Before a training step; `batch` is on the device."""

    def on_train_batch_end(
        self, trainer: "TrainerInterface", module: "TrainingModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Called after a training step, and after the optimizer step if one follows."""

    def on_before_backward(self, trainer: "TrainerInterface", module: "TrainingModule", loss: "Tensor") -> None:
        """Before each backward pass."""

    def on_after_backward(self, trainer: "TrainerInterface", module: "TrainingModule") -> None:
        """After the backward pass, before gradients are clipped."""

    def on_before_optimizer_step(
        self, trainer: "TrainerInterface", module: "TrainingModule", optimizer: "Optimizer"
    ) -> None:
        """Before the optimizer step, when all gradients are computed and not clipped."""

    def on_before_zero_grad(
        self, trainer: "TrainerInterface", module: "TrainingModule", optimizer: "Optimizer"
    ) -> None:
        """After the optimizer's step, before gradients are set to zero."""

    def on_validation_start(self, trainer: "TrainerInterface", module: "TrainingModule") -> None:
        """At the start of a validation."""

    def on_validation_end(self, trainer: "TrainerInterface", module: "TrainingModule") -> None:
        """At the end of a validation."""

    def on_validation_epoch_start(self, trainer: "TrainerInterface", module: "TrainingModule") -> None:
        """Before the first batch of a validation."""

    def on_validation_epoch_end(self, trainer: "TrainerInterface", module: "TrainingModule") -> None:
        """After the last batch of a validation."""

    def on_validation_batch_start(
        self, trainer: "TrainerInterface", module: "TrainingModule", batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Before each batch of a validation."""

    def on_validation_batch_end(
        self,
        trainer: "TrainerInterface",
        module: "TrainingModule",
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """After each batch of a validation."""

    def on_test_start(self, trainer: "TrainerInterface", module: "TrainingModule") -> None:
        """At the start of a test."""

    def on_test_end(self, trainer: "TrainerInterface", module: "TrainingModule") -> None:
        """At the end of a test."""

    def on_test_batch_start(
        self, trainer: "TrainerInterface", module: "TrainingModule", batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Before each batch of a test."""

    def on_test_batch_end(
        self,
        trainer: "TrainerInterface",
        module: "TrainingModule",
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """After each batch of a test."""

    def on_test_epoch_start(self, trainer: "TrainerInterface", module: "TrainingModule") -> None:
        """Before the first batch of a test."""

    def on_test_epoch_end(self, trainer: "TrainerInterface", module: "TrainingModule") -> None:
        """After the last batch of a test."""

    def on_predict_start(self, trainer: "TrainerInterface", module: "TrainingModule") -> None:
        """At the start of a prediction."""

    def on_predict_end(self, trainer: "TrainerInterface", module: "TrainingModule") -> None:
        """At the end of a prediction."""

    def on_predict_epoch_start(self, trainer: "TrainerInterface", module: "TrainingModule") -> None:
        """Before the first batch of a prediction."""

    def on_predict_epoch_end(self, trainer: "TrainerInterface", module: "TrainingModule") -> None:
        """After the last batch of a prediction."""

    def on_predict_batch_start(
        self, trainer: "TrainerInterface", module: "TrainingModule", batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Before each batch of a prediction."""

    def on_predict_batch_end(
        self,
        trainer: "TrainerInterface",
        module: "TrainingModule",
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """After each batch of a prediction."""

    def on_exception(self, trainer: "TrainerInterface", module: "TrainingModule", exception: BaseException) -> None:
        """Called as a fit or an evaluation fails or is interrupted.

        Snapshots have none of its changes.
        """

    def on_save_checkpoint(
        self, trainer: "TrainerInterface", module: "TrainingModule", checkpoint: dict[str, Any]
    ) -> None:
        """Add state that is not in `state_dict` to `checkpoint`, which the module's hook gets, too."""

    def on_load_checkpoint(
        self, trainer: "TrainerInterface", module: "TrainingModule", checkpoint: dict[str, Any]
    ) -> None:
        """Restore the entries that `on_save_checkpoint` added."""


@dataclass(frozen=True)
class FirstState:
    """The state of a callback before its first fit.

    Args:
        state: of its `state_dict`; None if that needs something that `on_fit_start` makes.
        attributes: a copy of its attributes in that case.
    """

    state: dict[str, Any] | None
    attributes: dict[str, Any]

    def restore(self, callback: Callback) -> None:
        """Give `callback` this state again."""
        if self.state is not None:
            callback.load_state_dict(copy.deepcopy(self.state))
        else:
            vars(callback).update(copy.deepcopy(self.attributes))


#: id of a callback that was in a fit -> a reference to it, and its state before its first fit
_FIRST_STATES: dict[int, tuple["weakref.ref[Callback]", FirstState]] = {}


def first_state(callback: Callback) -> FirstState:
    """Return the state of `callback` before its first fit; without a record, its state now."""
    if (known := _FIRST_STATES.get(id(callback))) is not None:
        return known[1]
    try:
        return FirstState(copy.deepcopy(callback.state_dict()), {})
    except Exception:  # it needs what on_fit_start makes; if not, the first snapshot raises
        with suppress(Exception):
            return FirstState(None, copy.deepcopy(vars(callback)))
        return FirstState(None, {})


def keep_first_state(callback: Callback, state: FirstState) -> None:
    """Record `state` as the state of `callback` before its first fit."""
    key = id(callback)
    if key not in _FIRST_STATES:
        _FIRST_STATES[key] = weakref.ref(callback, lambda _: _FIRST_STATES.pop(key, None)), state


class TrainedWeights(Callback):
    """Keeps only trained parameters and buffers in `best` and `last`, as those of an adapter.

    Loading them leaves the other parameters of the module as they are.
    """

    def __init__(self) -> None:
        self._module: TrainingModule | None = None

    def on_fit_start(self, trainer: "TrainerInterface", module: "TrainingModule") -> None:
        """Take the module, whose parameters may begin to train later."""
        self._module = module

    def kept(self) -> set[str]:
        """Return the names of parameters that train, and of buffers."""
        assert self._module is not None
        parameters = self._module.named_parameters(remove_duplicate=False)
        trained = {name for name, parameter in parameters if parameter.requires_grad}
        return trained | {name for name, _ in self._module.named_buffers(remove_duplicate=False)}

    def evaluated_weights(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Return those of `weights` that are kept."""
        kept = self.kept()
        return {name: value for name, value in weights.items() if name in kept}

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: which parameters train is a part of the module's state."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore nothing."""


class LearningRateMonitor(Callback):
    """Logs every optimizer's learning rate at every step, as "lr", or "lr/0", "lr/1" and so on."""

    def on_train_batch_start(
        self, trainer: "TrainerInterface", module: "TrainingModule", batch: Any, batch_idx: int
    ) -> None:
        """Log the rate that this batch's step will use."""
        rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
        for index, rate in enumerate(rates):
            name = "lr" if len(rates) == 1 else f"lr/{index}"
            trainer.metric_logger.rows.set_next(name, number(name, rate) if isinstance(rate, Tensor) else float(rate))


class FixedCallbacks(tuple[Callback, ...]):
    """The callbacks of a Trainer in the order of their calls; none can be added or removed."""

    __slots__ = ()

    def append(self, *_: object) -> NoReturn:
        """Refuse the change: hooks are looked up once, so it would have no effect.

        Raises:
            UserError: always.
        """
        raise UserError(
            "trainer.callbacks cannot be changed: pass callbacks to Trainer(callbacks=[...]), or return them in the "
            "module's configure_callbacks. All attempts need the same ones."
        )

    extend = insert = remove = pop = clear = append
