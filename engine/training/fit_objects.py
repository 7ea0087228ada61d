"""Objects of a fit as roots of a graph: module, callbacks, data, optimizers, schedulers."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from midstride.engine.checkpointing.roots import (
    SamplerValues,
    data_in,
    data_roots,
    global_generators,
    loader_roots,
    optimizer_roots,
    sources,
    unsaved_values,
)
from midstride.engine.code_origin import is_user_class
from midstride.engine.data.data_owners import WholeData
from midstride.engine.data.loader import FitLoaders, ResumableLoader
from midstride.engine.modules.callback_states import by_class_name
from midstride.engine.modules.callbacks import Callback
from midstride.engine.modules.module import DataModule
from midstride.engine.objects.attributes import attributes_of
from midstride.engine.objects.object_state import Objects
from midstride.engine.objects.roots import QuietOwners, Root, module_anchors, module_roots
from midstride.engine.optim.schedulers import saved_schedulers
from midstride.engine.state.module_index import Members
from midstride.engine.training.context import EvaluationContext, FitContext

__all__ = ["classes_of", "evaluated_objects", "objects_of", "watched_values"]


def objects_of(context: FitContext) -> Objects:
    """Return the objects of a fit as one part of its state.

    Args:
        context: context of the fit.
    """
    data = _data_of(context.loaders, context.source)
    samplers = SamplerValues(lambda: _loaders(context.loaders))
    callbacks = by_class_name(context.callbacks)

    def roots(members: Members, quiet: QuietOwners | None) -> Iterator[Root]:
        yield from module_roots(members, quiet)
        yield Root("trainer", "", context.trainer.set_by_users(), context.trainer, is_setup=True)
        yield from _callback_roots(callbacks)
        yield from data_roots(data)
        yield from loader_roots(_loaders(context.loaders))
        yield from samplers.roots()
        yield from optimizer_roots(context.optimizers, context.schedulers)
        yield from global_generators([*members.modules.values(), *context.callbacks, *data.values()])

    def anchors(members: Members) -> dict[str, object]:
        named: dict[str, object] = {"trainer": context.trainer, **module_anchors(members)}
        named |= {f"callback {number}": callback for number, callback in enumerate(context.callbacks)}
        named |= {f"optimizer {number}": optimizer for number, optimizer in enumerate(context.optimizers)}
        for number, config in enumerate(context.schedulers):
            named |= saved_schedulers(config.scheduler, f"scheduler {number}")
        named |= {f"data {name}": owner for name, owner in data.items()} | samplers.anchors()
        return named | _loaders(context.loaders)

    takes_settings = "settings" in context.settings.accept_change
    return Objects(context.module, roots, anchors, context.device, takes_settings=takes_settings)


def evaluated_objects(context: EvaluationContext, loader: ResumableLoader) -> Objects:
    """Return the objects that an evaluation's step may change; no snapshot has this form.

    Args:
        context: context of the evaluation.
        loader: loader of its batches.
    """
    loaders = sources({"evaluation": loader})
    data = {name: owner for name, owner in data_in(loaders).items() if not isinstance(owner, WholeData)}
    data |= {"module": source} if isinstance(source := context.trainer.datamodule, DataModule) else {}
    callbacks = {str(n): callback for n, callback in enumerate(context.callbacks) if is_user_class(type(callback))}
    holders = [context.module, *context.module.modules(), *context.callbacks, *data.values()]

    def roots(members: Members, quiet: QuietOwners | None) -> Iterator[Root]:
        yield from module_roots(members, quiet)
        yield Root("trainer", "", context.trainer.set_by_users(), context.trainer, is_setup=True)
        for number, callback in callbacks.items():
            yield Root("callbacks", number, attributes_of(callback), callback, is_setup=True)
        for name, owner in data.items():
            yield Root("data", name, attributes_of(owner), owner, is_setup=True, is_data=True)
        yield from global_generators(holders)

    def anchors(members: Members) -> dict[str, object]:
        named: dict[str, object] = {"trainer": context.trainer, **module_anchors(members)}
        named |= {f"callback {number}": callback for number, callback in callbacks.items()}
        return named | {f"data {name}": owner for name, owner in data.items()} | loaders

    return Objects(context.module, roots, anchors, context.device, is_kept=False)


def watched_values(context: FitContext, objects: Objects) -> Callable[[], Iterator[tuple[str, object]]]:
    """Return a function that yields names and values of changeable state outside of snapshots."""
    data = _data_of(context.loaders, context.source)
    holders = [context.module, *context.module.modules(), *context.callbacks, *data.values()]
    return lambda: unsaved_values(holders, _loaders(context.loaders), objects)


def classes_of(context: FitContext) -> set[type]:
    """Return the classes of a fit's module and submodules, callbacks, source, data, samplers."""
    data, loaders = _data_of(context.loaders, context.source), _loaders(context.loaders)
    return {
        *map(type, (*context.module.modules(), *context.callbacks, context.source, *data.values(), *loaders.values()))
    }


def _data_of(fit_loaders: FitLoaders, source: object) -> dict[str, Any]:
    """Return the objects by name that data are read from in the main process."""
    found: dict[str, Any] = {"module": source} if isinstance(source, DataModule) else {}
    return found | data_in(_loaders(fit_loaders))


def _loaders(fit_loaders: FitLoaders) -> dict[str, Any]:
    """Return every loader and sampler of `fit_loaders`, by name."""
    validation = {f"validation {n}": resumable for n, resumable in enumerate(fit_loaders.validation)}
    return sources({"training": fit_loaders.training, **validation})


def _callback_roots(callbacks: Mapping[str, Callback]) -> Iterator[Root]:
    """Yield the attributes of users' callbacks without a `state_dict` of their own."""
    for name, callback in callbacks.items():
        if is_user_class(type(callback)):
            is_kept = type(callback).state_dict is not Callback.state_dict
            yield Root("callbacks", name, {} if is_kept else attributes_of(callback), callback, is_setup=True)
