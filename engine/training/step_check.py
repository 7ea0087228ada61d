"""Steps that are executed twice from the same state and compared: `trainer.verify_every`.

A machine that computes wrongly gives other bits the second time. The layers' outputs, the losses and the gradients
before their exchange tell which rank's machine it is.
"""

import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from midstride.engine.checkpointing.checkpointer import Checkpointer
from midstride.engine.checkpointing.restore_check import copied_with_digests, differs, with_places, with_same_tensors
from midstride.engine.errors import EngineError, NotExact, WorldError
from midstride.engine.modules.compiled import is_compiled_anywhere
from midstride.engine.processes.preload import collector_paused
from midstride.engine.state.differences import first_difference
from midstride.engine.state.module_index import ModuleIndex
from midstride.engine.state.stateful import Stateful, state_of
from midstride.engine.state.tensor_digest import tensor_digest
from midstride.engine.state.tensors import form_of
from midstride.engine.strategies.mixins import RunsBackward
from midstride.engine.strategies.step import loss_in
from midstride.engine.strategies.torch_internals import version_of
from midstride.engine.training.context import FitContext
from midstride.engine.training.fit_state import fit_state
from midstride.engine.training.optimizer_step import OptimizerStep
from midstride.engine.trees import convert, named_leaves

__all__ = ["StepCheck"]

#: parts of the state that a step changes, in the order of the restore
_PARTS = (
    *("progress", "module", "optimizers", "schedulers", "precision", "callbacks", "gradients", "modes", "buffers"),
    *("objects", "generators"),
)
#: of a much larger output or gradient, only so many bytes are read: a wrong value spreads to the next layer
_SAMPLE_BYTES = 1 << 16
#: a copied tensor of so many bytes or more keeps its memory for the next check
_LARGE_BYTES = 1 << 16


class StepCheck:
    """Trains on batches in place of `OptimizerStep.train`, and executes some of them twice.

    The second step of an attempt is always executed twice: a step that depends on something outside the state differs
    there, and is refused. In the first one, DDP has other buckets than later.

    Args:
        context: context of the fit.
        step: trains on a batch.
        checkpointer: of the fit; None if no snapshots are taken.
        every: steps between two that are executed twice.
    """

    def __init__(self, context: FitContext, step: OptimizerStep, checkpointer: Checkpointer | None, every: int) -> None:
        self._context, self._step, self._checkpointer, self._every = context, step, checkpointer, every
        self._has_tried, self._steps, self._memory = False, 0, list[Tensor]()

    def train(self, batch: Any, index: int) -> Any:
        """Train on a batch as `OptimizerStep.train` does; arguments and result are the same."""
        number = self._context.progress.step + 1
        self._steps += (closes := self._step.closes_window(index + 1))
        if not closes or self._steps == 1 or (self._has_tried and number % self._every):
            return self._step.train(batch, index)
        with collector_paused():
            outputs, found = self._train_twice(batch, index)
        everyone = self._context.collective.gather(found)
        if any(everyone):
            self._refuse(number, everyone)
        if self._checkpointer is not None:
            self._checkpointer.trust(number)
        self._has_tried = True
        return outputs

    def _train_twice(self, batch: Any, index: int) -> tuple[Any, "_Difference | None"]:
        context, parts = self._context, self._parts()
        logger = context.metric_logger
        undos = logger.rollback_point(), logger.metrics.rollback_point(), context.samples.rollback_point()
        before = _SavedState(parts, self._state(parts), self._memory)
        with _traced(context) as first:
            first.note_loss(self._step.train(convert(batch, Tensor.clone), index))
        after = self._state(parts)
        changed = before.changed(after)
        after = copied_with_digests(after)
        self._step.forget_batch()
        for undo in undos:
            undo()
        before.restore(changed)
        with _traced(context) as second:
            outputs = self._second(batch, index)
            second.note_loss(outputs)
        found = first.difference(second)
        if found is None:
            found = _of_states(differs(after, self._state(parts)), first.place)
        return outputs, found

    def _second(self, batch: Any, index: int) -> Any:
        """Train on a batch again.

        Raises:
            NotExact: the step raised an error this time.
        """
        try:
            return self._step.train(batch, index)
        except EngineError as error:
            raise NotExact(f"{error}\n{_way_out('the second execution of a step raised this error')}") from error

    def _state(self, parts: Mapping[str, Stateful]) -> dict[str, Any]:
        with ModuleIndex.of(self._context.module).kept():
            return state_of(parts)

    def _parts(self) -> Mapping[str, Stateful]:
        checkpointer = self._checkpointer
        parts = fit_state(self._context).parts if checkpointer is None else checkpointer.parts
        return {name: parts[name] for name in _PARTS}

    def _refuse(self, number: int, everyone: Sequence["_Difference | None"]) -> None:
        """Raise the error of a step whose two executions differ, on all ranks.

        Raises:
            NotExact: it is the first step that this attempt has executed twice.
            WorldError: the step of an earlier check was equal; snapshots since then are set aside.
        """
        found = [one for one in everyone if one is not None]
        least = min(one.order for one in found)
        suspects = [one for one in found if one.order == least]
        origins = [one for one in suspects if one.is_origin] or suspects
        what = f"step {number}, executed twice from the same state, differs: {origins[0].what}"
        if not self._has_tried:
            raise NotExact(f"{what} on {origins[0].place}. {_way_out('this is the first check of the attempt')}")
        where = " or ".join(one.place for one in origins)
        shared = "the ranks have exchanged it, so one of them is wrong: " if 1 < len(origins) == len(everyone) else ""
        kept = "" if self._checkpointer is None else f". {self._checkpointer.distrust()}"
        raise WorldError(f"{what} on {shared}{where}. This machine or device computes wrongly{kept}")


def _way_out(why: str) -> str:
    return (
        f"verify_every: {why}. The step depends on something outside the state: a clock, a file, its own generator. "
        f"Remove it, or verify_every"
    )


@dataclass(frozen=True)
class _Difference:
    """The first difference of two executions on one rank.

    Args:
        order: 0 in a forward pass, 1 in its loss, 2 in a gradient before its exchange, 3 in the state afterwards.
        what: differs, as text.
        place: the rank, with its machine and device.
        is_origin: whether everything that it was computed from is equal.
    """

    order: int
    what: str
    place: str
    is_origin: bool = True


@dataclass
class _Trace:
    """Digests of one execution, each kind by name in the order of execution."""

    place: str
    #: layer -> digests of its input and output
    layers: dict[str, tuple[str, str]] = field(default_factory=dict)
    losses: dict[str, str] = field(default_factory=dict)
    gradients: dict[str, str] = field(default_factory=dict)
    #: tensors of the newest output, most often the next input: id -> the tensor, its version, its digest
    _newest: dict[int, tuple[Tensor, int, str]] = field(default_factory=dict)

    def note_layer(self, name: str, layer: nn.Module, inputs: Any, output: Any) -> None:
        """Note a call of a layer."""
        given = self._digest(inputs)
        self._newest.clear()
        self.layers[_free(f"{name} ({type(layer).__name__})", self.layers)] = given, self._digest(output)

    def note_loss(self, outputs: Any) -> None:
        """Note the loss in the outputs of the training step."""
        self._newest.clear()
        self.losses["the loss"] = self._digest(loss_in(outputs))
        self._newest.clear()

    def note_gradient(self, name: str, gradient: Tensor) -> None:
        """Note a gradient of this rank, before it is added to others."""
        self.gradients[_free(name, self.gradients)] = tensor_digest(gradient, _SAMPLE_BYTES)

    def _digest(self, values: Any) -> str:
        return " ".join(
            self._digest_once(leaf) if isinstance(leaf, Tensor) else repr(leaf)[:100]
            for _, leaf in named_leaves(values)
            if isinstance(leaf, (Tensor, bool, int, float, str))
        )

    def _digest_once(self, tensor: Tensor) -> str:
        """Return the digest of a tensor, which may be one of the newest output."""
        if tensor.is_inference():  # has no version
            return tensor_digest(tensor, _SAMPLE_BYTES)
        known, version = self._newest.get(id(tensor)), version_of(tensor)
        if known is None or known[1] != version:
            known = tensor, version, tensor_digest(tensor, _SAMPLE_BYTES)
            self._newest[id(tensor)] = known
        return known[2]

    def difference(self, other: "_Trace") -> _Difference | None:
        """Return the first difference from another execution; None if all is equal."""
        for name, (given, returned) in self.layers.items():
            theirs = other.layers.get(name)
            if theirs != (given, returned):
                is_origin = theirs is None or theirs[0] == given
                return _Difference(0, f"the {'output' if is_origin else 'input'} of {name}", self.place, is_origin)
        if self.losses != other.losses:
            return _Difference(1, "the loss", self.place)
        for name, digest in self.gradients.items():
            if other.gradients.get(name) != digest:
                return _Difference(2, f"the gradient of {name}", self.place)
        return None


def _free(name: str, taken: Mapping[str, Any]) -> str:
    number = 2
    free = name
    while free in taken:
        free, number = f"{name}, call {number}", number + 1
    return free


class _SavedState:
    """A copy of the state in `parts`, to be restored in place: tensors keep their memory.

    Args:
        parts: of the state.
        state: of them.
        memory: large tensors of an earlier copy. This copy uses their memory and then replaces them by its own. New
            memory takes several times as long: each page of it causes a fault.
    """

    def __init__(self, parts: Mapping[str, Stateful], state: dict[str, Any], memory: list[Tensor]) -> None:
        self._parts, self._tensors = parts, list[Tensor]()
        self._state = with_same_tensors(state, self._tensors)
        free: dict[Any, list[Tensor]] = {}
        for one in memory:
            free.setdefault(form_of(one), []).append(one)
        self._values = [_copied(tensor.detach(), free) for tensor in self._tensors]
        memory[:] = filter(_has_many_pages, self._values)
        self._placed = with_places(state)

    def changed(self, now: Mapping[str, Any]) -> list[str]:
        """Return the parts whose state `now` differs, apart from the content of the same tensors."""
        return [name for name, part in self._placed.items() if first_difference(part, now[name]) is not None]

    def restore(self, changed: Iterable[str]) -> None:
        """Put the content of all tensors back, and then the parts that have `changed` apart from it."""
        with torch.no_grad():
            for tensor, value in zip(self._tensors, self._values, strict=True):
                tensor.copy_(value)
        for name in changed:
            self._parts[name].load_state_dict(self._state[name])


def _copied(tensor: Tensor, free: dict[Any, list[Tensor]]) -> Tensor:
    """Return a copy of `tensor`, in the memory of a free one of its form if possible."""
    found = free.get(form_of(tensor)) if _has_many_pages(tensor) else None
    return found.pop().copy_(tensor) if found else tensor.clone()


def _has_many_pages(tensor: Tensor) -> bool:
    """Return whether `tensor` is large, on the CPU, and its memory can take another."""
    is_plain = type(tensor) is Tensor and tensor.is_cpu and tensor.layout == torch.strided
    return is_plain and not (tensor.is_nested or tensor.is_quantized) and tensor.nbytes >= _LARGE_BYTES


def _of_states(paths: Sequence[str], place: str) -> _Difference | None:
    """Return the first of the differences of the states after two executions; None without any."""
    return _Difference(3, paths[0].partition(" (")[0].replace("/", " ", 1), place) if paths else None


@contextmanager
def _traced(context: FitContext) -> Iterator[_Trace]:
    """Trace the execution of a step in the block."""
    module, world = context.module, context.world
    trace = _Trace(f"rank {world.rank} (machine {platform.node()}, {context.device})")
    handles: list[Any] = []
    # A pipeline calls its layers once more where the shape of a batch is new.
    calls_once = not isinstance(context.strategy, RunsBackward) and len(context.strategy.devices) == 1
    if calls_once and not is_compiled_anywhere(module):
        for name, layer in module.named_modules():
            if name:
                handles.append(layer.register_forward_hook(partial(trace.note_layer, name)))
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            handles.append(parameter.register_hook(partial(trace.note_gradient, name)))
    try:
        yield trace
    finally:
        for handle in handles:
            handle.remove()
