"""One process that splits every batch over several devices."""

from typing import Any

from torch import Tensor, nn

from midstride.engine.modules.module import TrainingModule
from midstride.engine.strategies.base import Strategy, TrainingStep
from midstride.engine.strategies.replicas import SplitStep, in_parts
from midstride.engine.strategies.single import Single
from midstride.engine.user_code import call_user_code

__all__ = ["Dp", "Splits"]


class Splits(Strategy):
    """What strategies have in common whose processes split their batches; stands first among the bases."""

    @property
    def identity(self) -> str:
        """The name, and into how many parts a batch is cut: each has its own mean and its own statistics."""
        inner = super().identity.removesuffix(")")
        return f"{inner}{', ' if '(' in inner else '('}devices={len(self.devices)})"

    def refusals(self, module: TrainingModule) -> list[str]:
        """Name optimization by hand: every part would step the optimizers by itself."""
        if module.automatic_optimization:
            return []
        return [
            f"{type(module).__name__} has automatic_optimization = False: under {self.name} its training_step runs for "
            "each part of a batch, and each would step the optimizers. Use ddp, or automatic optimization."
        ]

    def evaluate(self, module: TrainingModule, step: str, batch: Any, *arguments: Any) -> Any:
        """Return the joined outputs of the user's step on the parts of `batch`."""

        def call(replica: TrainingModule, part: Any) -> Any:
            return call_user_code(f"{type(module).__name__}.{step}", getattr(replica, step), part, *arguments)

        return in_parts(module, batch, self.devices, call)

    def joined(self, outputs: Any) -> Any:
        """Return outputs whose loss is the mean of the parts' losses, where it still is one for each part."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if not isinstance(loss, Tensor) or loss.ndim != 1 or len(loss) > len(self.devices):
            return outputs
        return {**outputs, "loss": loss.mean()} if isinstance(outputs, dict) else loss.mean()


class Dp(Splits, Single):
    """Split every batch over the devices of this process; on the CPU, over so many virtual ones.

    The module is replicated for each part, gradients are added in the order of the parts, and the buffers that stay
    are those of the first replica. `*_step_end` gets the parts' outputs joined, so a loss made there sees the batch.
    """

    name = "dp"

    def wrap(self, step: TrainingStep, *, one_backward: bool) -> nn.Module:
        """Return `step`, on parts of the batch."""
        return SplitStep(step, self.devices)
