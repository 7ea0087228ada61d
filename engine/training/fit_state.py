"""State of a fit: the parts that decide its future, and the facts of each snapshot."""

from collections.abc import Callable
from typing import Any, get_args

import torch

from midstride.engine.checkpointing.gradients import Gradients
from midstride.engine.checkpointing.hook_changes import HookChanges
from midstride.engine.checkpointing.identity import FREE_ARGUMENTS, identity_of, is_json
from midstride.engine.checkpointing.run_state import RunFacts, RunState
from midstride.engine.checkpointing.settings import Settings
from midstride.engine.checkpointing.unsaved_state import IN_A_MODULE
from midstride.engine.code_origin import module_of
from midstride.engine.config.options import IdentityOption
from midstride.engine.errors import UnsupportedState, UserCodeError
from midstride.engine.modules.callback_states import Callbacks
from midstride.engine.modules.callbacks import TrainedWeights
from midstride.engine.modules.compiled import is_compiled_anywhere
from midstride.engine.modules.hooks import Hooks
from midstride.engine.modules.module import DataModule
from midstride.engine.modules.module_state import NonPersistentBuffers
from midstride.engine.modules.monitors import BestCheckpoint
from midstride.engine.modules.quantized import ModuleWeights
from midstride.engine.modules.structure import ModuleStructure
from midstride.engine.objects.kinds.tensors import mark_device_tensors, place_device_tensors
from midstride.engine.objects.object_state import Objects
from midstride.engine.optim.optimizers import OptimizerList
from midstride.engine.optim.schedulers import SchedulerList
from midstride.engine.seeds import Generators
from midstride.engine.state.codec import encode_lazily
from midstride.engine.state.module_index import ModuleIndex
from midstride.engine.state.stateful import AlikeOnRanks, Stateful
from midstride.engine.strategies.mixins import ModelParallel, saved_weights
from midstride.engine.training.context import EvaluationContext, FitContext
from midstride.engine.training.fit_objects import classes_of, objects_of, watched_values

__all__ = ["FitFacts", "devices_of", "fit_state", "state_parts"]


def fit_state(context: FitContext) -> RunState:
    """Return the state of a fit, before anything is restored."""
    objects, index = objects_of(context), ModuleIndex.of(context.module)

    def parts_anew() -> dict[str, Stateful]:
        index.forget()  # a hook may have changed the module
        return parts

    hook_changes = HookChanges(parts_anew)
    parts = state_parts(context, objects, hook_changes)
    return RunState(
        parts=parts,
        loaders=context.loaders,
        samples=context.samples,
        settings=Settings(
            context.optimizers,
            context.schedulers,
            is_accepted="settings" in context.settings.accept_change,
            attributes=lambda: objects.without_effect,
        ),
        facts=FitFacts(context),
        weights=lambda: _evaluated_weights(context),
        watched=watched_values(context, objects),
        places=objects.places,
        code=lambda: [*classes_of(context), *objects.code],
        way_to_keep=IN_A_MODULE,
        hook_changes=hook_changes,
        reading=index.kept,
    )


def _evaluated_weights(context: FitContext) -> dict[str, Any]:
    def evaluated(weights: dict[str, Any]) -> dict[str, Any]:
        for callback in context.callbacks:
            weights = callback.evaluated_weights(weights)
        return weights

    return saved_weights(context.strategy, context.module, evaluated)


def state_parts(context: FitContext, objects: Objects, hook_changes: HookChanges) -> dict[str, Stateful]:
    """Return all state of a fit, by name, in the order of the restore.

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
        "module": wrap(ModuleWeights(context.module)),
        "optimizers": wrap(OptimizerList(lambda: context.optimizers, context.module)),
        "schedulers": SchedulerList(context.schedulers),
        "precision": context.precision,
        "callbacks": Callbacks([*context.callbacks, *_own_state(context.source)], context.device),
        "logged": context.metric_logger,
        "metrics": context.metric_logger.metrics,
        "gradients": wrap(Gradients(context.module)),
        "modes": context.modes,
        "buffers": NonPersistentBuffers(context.module, context.device),
        "objects": objects,
        "user": UserState(context.hooks, context.device, hook_changes),
        "generators": Generators(context.generator, alike=context.lanes is not None, devices=devices_of(context)),
    }


def devices_of(context: EvaluationContext) -> list[torch.device]:
    """Return this rank's devices: the strategy's, then others that hold parameters."""
    parameters = ModuleIndex.of(context.module).now().parameters.values()
    return [*dict.fromkeys([*context.strategy.devices, *(parameter.device for parameter in parameters)])]


def _own_state(source: object) -> list[DataModule]:
    """Return a list of the DataModule of a fit if it defines `state_dict`, else []."""
    return [source] if isinstance(source, DataModule) and type(source).state_dict is not DataModule.state_dict else []


def _identity(part: Stateful) -> Stateful:
    return part


class FitFacts(RunFacts):
    """Facts of a fit: module, data, their arguments, and options that decide its bits."""

    def __init__(self, context: FitContext) -> None:
        self._context = context

    def identity(self) -> dict[str, Any]:
        """Return module, data, arguments, seed, options, precision, strategy; all ranks call this."""
        context = self._context
        given = dict(context.settings.identity)
        arguments = given.pop("data_args", {})
        options, order = context.options, context.collective.broadcast(context.loaders.training.order_identity())
        if (batch_size := order.pop("global_batch_size", None)) is not None:
            order["global_batch_size"] = batch_size * options.accumulate_grad_batches
        return {
            "module": _module_path(context),
            "module_args": context.module.hparams,
            "data": type(context.source).__qualname__,
            **given,
            "data_args": {key: value for key, value in arguments.items() if key not in FREE_ARGUMENTS},
            "seed": context.settings.seed,
            **order,
            **{name: getattr(options, name) for name in get_args(IdentityOption)},
            "precision": options.precision,
            "strategy": context.strategy.identity,
        }

    def classes(self) -> set[type]:
        """Return the classes of the module and its submodules, callbacks, data and samplers."""
        return classes_of(self._context)

    def environment(self) -> dict[str, Any]:
        """Return whether the module is compiled."""
        return {"compiled": is_compiled_anywhere(self._context.module)}

    def hyperparameters(self) -> dict[str, Any]:
        """Return "hparams": hyperparameters of data and loggers, which are not in the identity."""
        context = self._context
        saved = {} if context.source is context.module else getattr(context.source, "hparams", {})
        found = {**({"data_args": dict(saved)} if saved else {}), **context.metric_logger.hparams}
        return {"hparams": identity_of(found)} if found else {}

    def of_weights(self) -> dict[str, Any]:
        """Return metadata of weights, repeated by snapshots to rebuild a lost weights folder."""
        context, module, progress = self._context, self._context.module, self._context.progress
        kept = [sorted(one.kept()) for one in context.callbacks if isinstance(one, TrainedWeights)]
        return {
            "step": progress.step,
            "epoch": progress.epoch,
            "module": _module_path(context),
            "hparams": {name: value for name, value in module.hparams.items() if is_json(value)},
            "hparams_left_out": [name for name, value in module.hparams.items() if not is_json(value)],
            "metrics": {name: float(value) for name, value in context.metric_logger.values.items()},
            "monitors": [one.watched for one in context.callbacks if isinstance(one, BestCheckpoint)],
            **({"kept": kept[0]} if kept else {}),
        }


def _module_path(context: FitContext) -> str:
    kind = type(context.module)
    return f"{module_of(kind)}:{kind.__qualname__}"


class UserState(AlikeOnRanks):
    """The entries that `on_save_checkpoint` of callbacks and module adds."""

    description = "what on_save_checkpoint keeps"

    def __init__(self, hooks: Hooks, device: torch.device, changes: HookChanges | None = None) -> None:
        self._hooks, self._device, self._changes = hooks, device, changes or HookChanges(dict)
        hooks.drop_of_libraries(("on_save_checkpoint", "on_load_checkpoint"), _adds_unwritable)

    def state_dict(self) -> dict[str, Any]:
        """Call `on_save_checkpoint`, and return the entries."""
        state: dict[str, Any] = {}
        hooks = self._hooks.named("on_save_checkpoint")
        if hooks:
            self._changes.begin()
        for where, hook in hooks:
            hook(state)
            self._changes.after(where)
        marked: dict[str, Any] = mark_device_tensors(state)
        return marked

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Call `on_load_checkpoint` of the module, then of callbacks."""
        given = place_device_tensors(state_dict, self._device)
        self._hooks.call("on_load_checkpoint", given, of="module")
        self._hooks.call("on_load_checkpoint", given, of="callbacks")


def _adds_unwritable(hook: Callable[[dict[str, Any]], Any]) -> bool:
    """Return whether a library's `on_save_checkpoint` adds objects that cannot be written.

    Their attributes are saved anyway.
    """
    state: dict[str, Any] = {}
    try:
        hook(state)
        encode_lazily(mark_device_tensors(state))
    except (UnsupportedState, UserCodeError):  # or it needs more of a checkpoint of Lightning's than there is here
        return True
    return False
