"""The stages of a pipeline: the layers of `sequential_module` that a rank keeps."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from midstride.engine.errors import UserError
from midstride.engine.modules.torch_internals import buffers_of, children_of
from midstride.engine.strategies.pipeline.balance import bounds, tensors_of
from midstride.engine.user_code import call_user_code

__all__ = ["DeferredOutput", "Stage", "StagedSequential"]


class RemoteLayer(nn.Module):
    """A placeholder for a layer of another stage."""

    def _load_from_state_dict(self, *_: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Do nothing: the stage that has the layer loads it."""


class DeferredOutput:
    """Stands for the outputs of `sequential_module` in a training step, computed after the step.

    Args:
        x: input of `sequential_module`.
    """

    def __init__(self, x: Any) -> None:
        self.x = x

    @classmethod
    def __torch_function__(cls, *_: Any) -> NoReturn:
        cls._refuse()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    @staticmethod
    def _refuse() -> NoReturn:
        raise UserError(
            "training_step uses the outputs of sequential_module, which exist only on the last stage, in parts: return "
            "them unchanged. Compute the loss of each part in training_step_end(outputs, batch)."
        )


class StagedSequential(nn.Sequential):
    """`sequential_module` on a rank with the layers of one stage, which keep their names.

    Args:
        layers: all layers.
        balance: number of layers of each stage.
        stage: number of this rank's stage.
    """

    def __init__(self, layers: nn.Sequential, balance: Sequence[int], stage: int) -> None:
        named = zip(children_of(layers), layers, strict=True)  # a layer that occurs twice counts twice
        start, end = bounds(balance)[stage]
        own = [(name, layer if start <= i < end else RemoteLayer()) for i, (name, layer) in enumerate(named)]
        super().__init__(OrderedDict(own))
        self.training = layers.training
        self._balance, self._span = list(balance), (start, end)
        self._run: Callable[[Any], Any] = self._refuse

    @property
    def balance(self) -> list[int]:
        """Number of layers of each stage."""
        return self._balance

    @property
    def own(self) -> list[nn.Module]:
        """The layers of this rank."""
        return list(self)[slice(*self._span)]

    @property
    def first(self) -> int:
        """Index of the first layer of this rank."""
        return self._span[0]

    def set_pipeline(self, run: Callable[[Any], Any]) -> None:
        """Set the function that runs the forward pass of the whole pipeline; every rank calls it."""
        self._run = run

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """In the block, a call returns a `DeferredOutput` with its input."""
        run, self._run = self._run, DeferredOutput
        try:
            yield
        finally:
            self._run = run

    def forward(self, input: Any) -> Any:
        """Return the outputs of all layers for `input`, on every rank."""
        return self._run(input)

    def _refuse(self, x: Any) -> NoReturn:
        start, end = self._span
        raise UserError(
            f"after a fit with strategy pipeline, this process has only layers {start} to {end - 1} of the {len(self)} "
            "of sequential_module. Load the whole module from the run's best or last folder."
        )


class Stage(nn.Module):
    """The layers of one rank, one after the other.

    Args:
        layers: layers of this rank.
        first: index of the first of them, for messages.
        context: returns the context of each forward pass, such as autocast.
        is_last: whether this is the last stage, whose outputs are not sent.
        checkpoints: whether activations are recomputed for the backward pass (`torch.utils.checkpoint`).
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        first: int,
        context: Callable[[], AbstractContextManager[Any]],
        *,
        is_last: bool,
        checkpoints: bool,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._where = f"layers {first} to {first + len(layers) - 1} of sequential_module"
        self._context = context
        self._is_last, self._checkpoints = is_last, checkpoints

    def forward(self, *given: Tensor) -> Any:
        """Return the outputs of the layers for a tensor, or for the elements of a tuple of tensors."""
        with self._context():
            return call_user_code(self._where, self._checkpointed if self._checkpoints else self._run_layers, *given)

    def _checkpointed(self, *given: Tensor) -> Any:
        if not torch.is_grad_enabled():
            return self._run_layers(*given)
        return checkpoint(self._run_layers, *given, use_reentrant=False, context_fn=self._contexts)

    def _run_layers(self, *given: Tensor) -> Any:
        x: Any = given[0] if len(given) == 1 else given
        for layer in self.layers:
            x = layer(x)
        if self._is_last:
            return x
        sent = tuple(tensor.contiguous() for tensor in tensors_of(x))
        return sent if isinstance(x, tuple) else sent[0]

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        begun = [
            (module, {name: None if buffer is None else buffer.clone() for name, buffer in buffers_of(module).items()})
            for module in self.modules()
            if buffers_of(module)
        ]
        return torch.enable_grad(), self._with_buffers(begun)

    @contextmanager
    def _with_buffers(self, begun: Sequence[tuple[nn.Module, dict[str, Tensor | None]]]) -> Iterator[None]:
        """Run the recomputation with copies of the first pass's buffers, and drop their changes."""
        before = [(module, dict(buffers_of(module))) for module, _ in begun]
        for module, buffers in begun:
            buffers_of(module).update(buffers)
        try:
            yield
        finally:
            for module, buffers in before:
                buffers_of(module).update(buffers)
