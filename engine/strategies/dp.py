"""One process that splits every batch over several devices."""

from typing import Any

from torch import Tensor

from midstride.engine.modules.module import TrainingModule
from midstride.engine.strategies.base import Strategy
from midstride.engine.strategies.mixins import MergesOutputs
from midstride.engine.strategies.replicas import run_on_replicas
from midstride.engine.strategies.single import Single
from midstride.engine.strategies.step import StepName, StepScope, loss_in

__all__ = ["Dp", "SplitsBatches"]


class SplitsBatches(MergesOutputs, Strategy):
    """What strategies have in common whose processes split their batches; stands first among the bases."""

    @property
    def identity(self) -> str:
        """The name, and into how many parts a batch is cut: each has its own mean and its own statistics."""
        inner = super().identity.removesuffix(")")
        return f"{inner}{', ' if '(' in inner else '('}devices={len(self.devices)})"

    def module_errors(self, module: TrainingModule) -> list[str]:
        """Name optimization by hand: every chunk would step the optimizers by itself."""
        errors = super().module_errors(module)
        if module.automatic_optimization:
            return errors
        return [
            *errors,
            f"{type(module).__name__} has automatic_optimization = False: under {self.name} its training_step runs for "
            "each part of a batch, and each would step the optimizers. Use ddp, or automatic optimization.",
        ]

    def run_step(self, scope: StepScope, module: TrainingModule, name: StepName, batch: Any, *arguments: Any) -> Any:
        """Return the joined outputs of the user's step on the chunks of `batch`."""

        def run(replica: TrainingModule, chunk: Any) -> Any:
            return scope.call(replica, name, chunk, *arguments)

        return run_on_replicas(module, batch, self.devices, run, scope.micro_batches)

    def merge_outputs(self, outputs: Any) -> Any:
        """Return outputs whose loss is the mean of the chunks' losses, where it still is one for each chunk."""
        loss = loss_in(outputs)
        if not isinstance(loss, Tensor) or loss.ndim != 1 or len(loss) > len(self.devices):
            return outputs
        return {**outputs, "loss": loss.mean()} if isinstance(outputs, dict) else loss.mean()


class Dp(SplitsBatches, Single):
    """Split every batch over the devices of this process; on the CPU, over so many virtual ones.

    The module is replicated for each chunk, gradients are added in the order of the chunks, and the buffers that stay
    are those of the first replica. `*_step_end` gets the chunks' outputs joined, so a loss made there sees the batch.
    """

    name = "dp"
