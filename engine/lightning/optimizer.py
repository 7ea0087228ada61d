"""The optimizers that `self.optimizers()` of a LightningModule returns."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

__all__ = ["LightningOptimizer"]


class LightningOptimizer:
    """An optimizer with Lightning's additions; all other attributes are read from and set on the wrapped optimizer.

    Args:
        optimizer: the optimizer to wrap.
        module: the module that it trains.
    """

    optimizer: Optimizer
    _module: Any

    def __init__(self, optimizer: Optimizer, module: Any) -> None:
        vars(self).update(optimizer=optimizer, _module=module)

    #: class of the wrapped optimizer, so that `isinstance(self.optimizers(), torch.optim.Adam)` holds
    __class__: Any = property(lambda self: type(self.optimizer))

    def __getattr__(self, name: str) -> Any:
        if "optimizer" not in vars(self):  # during a copy or unpickling
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "step":  # a scheduler patches `step` to count calls
            vars(self)[name] = value
        else:
            setattr(self.optimizer, name, value)

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Step, after `closure` if there is one, and the hooks `on_before_optimizer_step`."""
        return self._module.trainer.step_optimizer(self.optimizer, closure, **options)

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Let only the parameters of this optimizer collect gradients in the block; `sync_grad` has no effect."""
        self._module.toggle_optimizer(self)
        try:
            yield
        finally:
            self._module.untoggle_optimizer(self)
