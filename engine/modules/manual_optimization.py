"""What a module calls to step its optimizers by hand; names follow Lightning's."""

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from midstride.engine.modules.interface import TrainerInterface

__all__ = ["ManualOptimization"]


class ManualOptimization:
    """The methods of a module that need its Trainer's optimizers."""

    #: parameters of other optimizers, which collect no gradients until `untoggle_optimizer`
    _toggled_off: tuple[nn.Parameter, ...] = ()

    @property
    @abstractmethod
    def trainer(self) -> "TrainerInterface":
        """The Trainer that runs this module."""

    def optimizers(self) -> Any:
        """Return the optimizer, or the list of them, for manual optimization."""
        optimizers = self.trainer.optimizers
        return optimizers[0] if len(optimizers) == 1 else optimizers

    def lr_schedulers(self) -> Any:
        """Return the scheduler, the list of them, or None."""
        schedulers = [config.scheduler for config in self.trainer.schedulers]
        return schedulers[0] if len(schedulers) == 1 else schedulers or None

    def manual_backward(self, loss: Tensor, **options: Any) -> None:
        """Run the backward pass of `loss`, with options of `Tensor.backward` such as `retain_graph`.

        Gradients are averaged over the ranks.
        """
        self.trainer.backward(loss, **options)

    def toggle_optimizer(self, optimizer: Optimizer) -> None:
        """Let parameters that only other optimizers train collect no gradients, until `untoggle_optimizer`."""
        self.untoggle_optimizer(optimizer)
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        others = (p for other in self.trainer.optimizers for group in other.param_groups for p in group["params"])
        self._toggled_off = tuple({id(p): p for p in others if p.requires_grad and id(p) not in mine}.values())
        for parameter in self._toggled_off:
            parameter.requires_grad_(False)

    def untoggle_optimizer(self, optimizer: Optimizer) -> None:
        """Undo `toggle_optimizer(optimizer)`."""
        for parameter in self._toggled_off:
            parameter.requires_grad_(True)
        self._toggled_off = ()

    def clip_gradients(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradients of what `optimizer` trains, by "norm" or "value"; by default as the Trainer was told."""
        options = self.trainer.options
        largest = options.gradient_clip_val if gradient_clip_val is None else gradient_clip_val
        algorithm: Any = gradient_clip_algorithm or options.gradient_clip_algorithm
        if largest is not None:
            self.trainer.clip_gradients(optimizer, largest, getattr(algorithm, "value", algorithm))
