"""A callback that averages weights, validates on the average, and saves it."""

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from midstride.engine.errors import UserError
from midstride.engine.modules.callbacks import Callback
from midstride.engine.state.row_shards import is_distributed

if TYPE_CHECKING:
    from midstride.engine.modules.interface import TrainerInterface
    from midstride.engine.modules.module import TrainingModule

__all__ = ["WeightAveraging"]


class WeightAveraging(Callback):
    """Keeps an average of the weights over the steps, by torch's `AveragedModel`.

    Validations of a fit run on the average, `best` and `last` hold it, and the module has it once the fit has ended.
    Training itself is not changed. Override `should_update` to choose other steps, or ends of epochs.

    Args:
        decay: weight of the average before in each update (EMA); None for the mean of all updates (SWA).
        every_steps: optimizer steps between updates.
        start_step: number of optimizer steps before the first update.
        use_buffers: whether buffers are averaged, too; otherwise the average has the module's.
        device: where the average is kept; by default the module's device.
        averaging: further arguments of `AveragedModel`: `avg_fn` or `multi_avg_fn`.
    """

    def __init__(
        self,
        decay: float | None = None,
        *,
        every_steps: int = 1,
        start_step: int = 0,
        use_buffers: bool = True,
        device: torch.device | str | int | None = None,
        **averaging: Any,
    ) -> None:
        self.every_steps, self.start_step, self.use_buffers = every_steps, start_step, use_buffers
        self.device = None if device is None else torch.device(device)
        self._decay, self._averaging = decay, averaging
        self._average: AveragedModel | None = None
        self._is_swapped = False
        #: number of optimizer steps, and the epoch, at the newest update
        self._updated_at, self._updated_in = 0, -1
        #: name of a parameter or buffer -> its number in the average
        self._numbers: dict[str, int] = {}

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return whether to update after an optimizer step, or an epoch; the other one is None.

        Args:
            step_idx: index of the step, from 0.
            epoch_idx: index of the epoch, from 0.
        """
        if step_idx is None:
            return False
        return step_idx >= self.start_step and step_idx % self.every_steps == 0

    def on_fit_start(self, trainer: "TrainerInterface", module: "TrainingModule") -> None:
        """Build an average that equals the module.

        Raises:
            UserError: no rank has all weights.
        """
        tensors = [*_tensors(module)]
        if any(is_distributed(one) or one.is_meta for one in tensors):
            raise UserError(
                "WeightAveraging needs all weights on each rank, and this strategy divides them: hold an AveragedModel "
                "in the module, as in docs/lightning.md"
            )
        device: Any = self.device  # torch's own annotation lacks torch.device
        # torch's function cannot be sent to ranks that are spawned: each makes its own.
        options: dict[str, Any] = {} if self._decay is None else {"avg_fn": get_ema_avg_fn(self._decay)}
        options |= self._averaging
        self._average = AveragedModel(_StandIn(module), device, use_buffers=self.use_buffers, **options)
        places = {id(one): number for number, one in enumerate(tensors)}
        named = (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
        self._numbers = {name: places[id(one)] for name, one in itertools.chain(*named)}
        self._updated_at, self._updated_in, self._is_swapped = 0, -1, False

    def on_train_batch_end(
        self, trainer: "TrainerInterface", module: "TrainingModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Update the average after an optimizer step."""
        step = trainer.global_step
        if step > self._updated_at and self.should_update(step_idx=step - 1):
            self._update(module)
            self._updated_at = step

    def on_train_epoch_end(self, trainer: "TrainerInterface", module: "TrainingModule") -> None:
        """Update the average after an epoch."""
        epoch = trainer.current_epoch
        if epoch > self._updated_in and self.should_update(epoch_idx=epoch):
            self._update(module)
            self._updated_in = epoch

    def on_validation_epoch_start(self, trainer: "TrainerInterface", module: "TrainingModule") -> None:
        """Put the average into the module, in a fit."""
        if trainer.is_fitting:
            self._swap(module)

    def on_validation_epoch_end(self, trainer: "TrainerInterface", module: "TrainingModule") -> None:
        """Put the trained weights back."""
        if self._is_swapped:
            self._swap(module)

    def on_train_end(self, trainer: "TrainerInterface", module: "TrainingModule") -> None:
        """Leave the average in the module."""
        with torch.no_grad():
            for average, own in zip(self._averages(), _tensors(module), strict=True):
                own.data.copy_(average)

    def evaluated_weights(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Return `weights` with the averages in place of the module's parameters and buffers."""
        if self._average is None or self._is_swapped:
            return weights
        averages = self._averages()
        numbers = self._numbers
        return {name: averages[numbers[name]] if name in numbers else value for name, value in weights.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the average, its number of updates, and when the newest was."""
        average = {} if self._average is None else dict(self._average.state_dict())
        return {"average": average, "updated_at": self._updated_at, "updated_in": self._updated_in}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore the average; before a fit there is none."""
        self._updated_at, self._updated_in = state_dict["updated_at"], state_dict["updated_in"]
        self._is_swapped = False
        if not state_dict["average"]:
            self._average = None
        elif self._average is not None:
            self._average.load_state_dict(state_dict["average"])

    def _averages(self) -> list[Tensor]:
        assert self._average is not None
        return [one.detach() for one in _tensors(self._average.module)]

    def _update(self, module: nn.Module) -> None:
        assert self._average is not None
        self._average.update_parameters(module)

    def _swap(self, module: nn.Module) -> None:
        self._is_swapped = not self._is_swapped
        with torch.no_grad():
            for average, own in zip(self._averages(), _tensors(module), strict=True):
                kept = average.clone()
                average.copy_(own.detach())
                own.data.copy_(kept)  # past the version counter, as the graph of a step is over


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yield parameters, then buffers, each once."""
    return itertools.chain(module.parameters(), module.buffers())


class _StandIn(nn.Module):
    """Copies of a module's parameters and buffers, in their order, without its code."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        for number, parameter in enumerate(module.parameters()):
            copied = nn.Parameter(parameter.detach().clone(), requires_grad=False)
            self.register_parameter(f"parameter_{number}", copied)
        for number, buffer in enumerate(module.buffers()):
            self.register_buffer(f"buffer_{number}", buffer.detach().clone())
