"""The parts of a fit's state: everything that decides how it goes on."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from midstride.engine.modules.callback_states import Callbacks
from midstride.engine.modules.hooks import Hooks
from midstride.engine.modules.module import DataModule, TrainingModule
from midstride.engine.modules.module_state import NonPersistentBuffers
from midstride.engine.modules.structure import ModuleStructure
from midstride.engine.objects.kinds.tensors import mark_device_tensors, place_device_tensors
from midstride.engine.optim.optimizers import OptimizerList
from midstride.engine.optim.schedulers import SchedulerList
from midstride.engine.seeds import Generators
from midstride.engine.state.stateful import AlikeOnRanks, Stateful
from midstride.engine.strategies.mixins import ModelParallel
from midstride.engine.training.checkpointing.roots import objects_of
from midstride.engine.training.context import EvaluationContext, FitContext

__all__ = ["Gradients", "devices_of", "state_parts"]


def state_parts(context: FitContext) -> dict[str, Stateful]:
    """Return everything that decides how a fit goes on, by name, in the order of the restore.

    The strategy is first, since the replay of its sums must not affect parts that are loaded later. The generators are
    last, since building and loading other parts may draw random numbers.
    """
    wrap = context.strategy.wrap_state if isinstance(context.strategy, ModelParallel) else _identity
    return {
        "strategy": context.strategy,
        "progress": context.progress,
        "samples": context.samples,
        "feeds": context.loaders,
        "structure": ModuleStructure(context.module, context.device),
        "module": wrap(context.module),
        "optimizers": wrap(OptimizerList(lambda: context.optimizers, context.module)),
        "schedulers": SchedulerList(context.schedulers),
        "precision": context.precision,
        "callbacks": Callbacks([*context.callbacks, *_own_state(context.source)], context.device),
        "logged": context.metric_logger,
        "metrics": context.metric_logger.metrics,
        "gradients": wrap(Gradients(context.module)),
        "modes": context.modes,
        "buffers": NonPersistentBuffers(context.module),
        "objects": objects_of(context),
        "user": UserState(context.hooks, context.device),
        "generators": Generators(context.generator, alike=context.lanes is not None, devices=devices_of(context)),
    }


def devices_of(context: EvaluationContext) -> list[torch.device]:
    """Return the devices of this rank: those of its strategy, then others that hold parameters of the module."""
    return [*dict.fromkeys([*context.strategy.devices, *(p.device for p in context.module.parameters())])]


def _own_state(source: object) -> list[DataModule]:
    """Return a list of the DataModule of a fit if it defines `state_dict`, else []."""
    return [source] if isinstance(source, DataModule) and type(source).state_dict is not DataModule.state_dict else []


def _identity(part: Stateful) -> Stateful:
    return part


class Gradients:
    """The gradients of this rank within an accumulation window; empty between steps."""

    def __init__(self, module: TrainingModule) -> None:
        self._module = module

    def state_dict(self) -> dict[str, Any]:
        """Return the gradients by the names of their parameters, without those that are None."""
        return {name: p.grad for name, p in self._module.named_parameters() if p.grad is not None}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore the gradients; parameters that have none in `state_dict` get None."""
        for name, parameter in self._module.named_parameters():
            parameter.grad = state_dict[name].to(parameter.device) if name in state_dict else None

    def resharded(self, states: Sequence[dict[str, Any]], rank: int) -> dict[str, Any]:
        """Return the mean over the ranks, which the exchange at the end of the window would have given."""
        names = dict.fromkeys(name for state in states for name in state)
        return {name: _mean([state[name] for state in states if name in state], len(states)) for name in names}


class UserState(AlikeOnRanks):
    """The entries that `on_save_checkpoint` of callbacks and module adds."""

    description = "what on_save_checkpoint keeps"

    def __init__(self, hooks: Hooks, device: torch.device) -> None:
        self._hooks, self._device = hooks, device

    def state_dict(self) -> dict[str, Any]:
        """Call `on_save_checkpoint`, and return the entries."""
        state: dict[str, Any] = {}
        self._hooks.call("on_save_checkpoint", state)
        marked: dict[str, Any] = mark_device_tensors(state)
        return marked

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Call `on_load_checkpoint` of the module, then of callbacks."""
        given = place_device_tensors(state_dict, self._device)
        self._hooks.call("on_load_checkpoint", given, of="module")
        self._hooks.call("on_load_checkpoint", given, of="callbacks")


def _mean(gradients: Sequence[Tensor], ranks: int) -> Tensor:
    if len(gradients) == ranks and all(torch.equal(gradients[0], other) for other in gradients):
        return gradients[0]  # they were exchanged already
    return torch.stack(list(gradients)).sum(0) / ranks
