"""One process that splits every batch over several devices."""

from collections.abc import Callable
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
    """Mixin of strategies whose processes split each batch over several devices; put it first among the bases."""

    @property
    def identity(self) -> str:
        """The name, and the number of chunks of a batch: each chunk has a mean and batch statistics of its own."""
        inner = super().identity.removesuffix(")")
        return f"{inner}{', ' if '(' in inner else '('}devices={len(self.devices)})"

    def module_errors(self, module: TrainingModule) -> list[str]:
        """Return messages, also on manual optimization: each chunk would step the optimizers."""
        errors = super().module_errors(module)
        if module.automatic_optimization:
            return errors
        return [
            *errors,
            f"{type(module).__name__} has automatic_optimization = False: under {self.name} its training_step runs for "
            "each part of a batch, and each would step the optimizers. Use ddp, or automatic optimization.",
        ]

    def step_call(self, scope: StepScope, module: TrainingModule, name: StepName) -> Callable[..., Any]:
        """Return a function that calls the user's step for each chunk of a batch and joins the outputs."""

        def on_replicas(batch: Any, *arguments: Any) -> Any:
            def run(replica: TrainingModule, chunk: Any) -> Any:
                return scope.call(replica, name, chunk, *arguments)

            return run_on_replicas(module, batch, self.devices, run, scope.micro_batches)

        return on_replicas

    def merge_outputs(self, outputs: Any) -> Any:
        """Replace a loss with one element per chunk by its mean; return other outputs as they are."""
        loss = loss_in(outputs)
        if not isinstance(loss, Tensor) or loss.ndim != 1 or len(loss) > len(self.devices):
            return outputs
        return {**outputs, "loss": loss.mean()} if isinstance(outputs, dict) else loss.mean()


class Dp(SplitsBatches, Single):
    """Split every batch over the devices of this process; on the CPU, over as many virtual devices.

    The module is replicated for each chunk, gradients are added in the order of the chunks, and the buffers of the
    first replica are kept. `<step>_end` gets the joined outputs, so a loss computed there is over the whole batch.
    """

    name = "dp"
