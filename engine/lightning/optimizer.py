"""What `self.optimizers()` of a LightningModule gives."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

__all__ = ["LightningOptimizer"]


class LightningOptimizer:
    """An optimizer with what Lightning adds to it; everything else is read from it, and set on it.

    Args:
        optimizer: torch's.
        module: that it trains.
    """

    optimizer: Optimizer
    _module: Any

    def __init__(self, optimizer: Optimizer, module: Any) -> None:
        vars(self).update(optimizer=optimizer, _module=module)

    #: torch's: `isinstance(self.optimizers(), torch.optim.Adam)`, which schedulers ask too
    __class__: Any = property(lambda self: type(self.optimizer))

    def __getattr__(self, name: str) -> Any:
        if "optimizer" not in vars(self):  # a copy that is being made
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "step":  # a scheduler that counts calls, and calls this one's
            vars(self)[name] = value
        else:
            setattr(self.optimizer, name, value)

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Step, after `closure` if there is one, and after the hooks `on_before_optimizer_step`."""
        return self._module.trainer.step_optimizer(self.optimizer, closure, **options)

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Let only what this optimizer trains collect gradients; averaged over the ranks whatever `sync_grad` says."""
        self._module.toggle_optimizer(self)
        try:
            yield
        finally:
            self._module.untoggle_optimizer(self)
