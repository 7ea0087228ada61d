"""The roots of a fit's object graph: module, callbacks, data, optimizers, schedulers, and generators in globals."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, Dataset

from midstride.engine.code_origin import is_user_class
from midstride.engine.data.data_owners import WholeData, data_owners
from midstride.engine.data.loader import FitLoaders, ResumableLoader
from midstride.engine.data.sampler_state import graph_attributes
from midstride.engine.data.worker_data import loader_attributes
from midstride.engine.modules.callback_states import by_class_name
from midstride.engine.modules.callbacks import Callback
from midstride.engine.modules.module import DataModule
from midstride.engine.objects.attributes import attributes_of
from midstride.engine.objects.kinds.generators import is_generator
from midstride.engine.objects.kinds.plain import PLAIN
from midstride.engine.objects.object_state import Objects
from midstride.engine.objects.roots import (
    Root,
    class_and_global_state,
    is_counted_in,
    module_anchors,
    module_roots,
    process_state,
    user_hooks,
)
from midstride.engine.objects.user_modules import user_modules
from midstride.engine.optim.schedulers import scheduler_objects
from midstride.engine.training.checkpointing.unsaved_state import UnsavedStateMonitor
from midstride.engine.training.context import EvaluationContext, FitContext

__all__ = ["classes_of", "evaluated_objects", "objects_of", "unsaved_state_monitor"]

#: attributes of an optimizer that its state_dict holds or that torch sets in every process
_OPTIMIZER_ATTRIBUTES = frozenset({"state", "param_groups", "step", "zero_grad"})
_OPTIMIZER_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def unsaved_state_monitor(context: FitContext, objects: Objects) -> UnsavedStateMonitor:
    """Return a monitor of values that user code may change and no snapshot holds."""
    data = _data_of(context.loaders, context.source)
    return UnsavedStateMonitor(lambda: _unsaved_values(context, data, objects))


def objects_of(context: FitContext) -> Objects:
    """Return the objects of a fit as one part of its state.

    Args:
        context: context of the fit.
    """
    data = _data_of(context.loaders, context.source)
    samplers = _SamplerValues(context.loaders)
    callbacks = by_class_name(context.callbacks)

    def roots() -> Iterator[Root]:
        yield from module_roots(context.module)
        yield Root("trainer", "", context.trainer.set_by_users(), context.trainer, is_setup=True)
        yield from _callback_roots(callbacks)
        for name, owner in data.items():
            is_whole = isinstance(owner, WholeData)
            yield Root("data", name, attributes_of(owner), None if is_whole else owner, is_setup=True, is_data=True)
        yield from _loader_roots(context.loaders)
        yield from samplers.roots()
        yield from _optimizer_roots(context)
        yield from _global_generators([context.module, *context.module.modules(), *context.callbacks, *data.values()])

    def anchors() -> dict[str, object]:
        named: dict[str, object] = {"trainer": context.trainer, **module_anchors(context.module)}
        named |= {f"callback {number}": callback for number, callback in enumerate(context.callbacks)}
        named |= {f"optimizer {number}": optimizer for number, optimizer in enumerate(context.optimizers)}
        named |= {f"scheduler {number}": config.scheduler for number, config in enumerate(context.schedulers)}
        named |= {f"data {name}": owner for name, owner in data.items()} | samplers.anchors()
        return named | _loaders(context.loaders)

    return Objects(roots, anchors, context.device)


def evaluated_objects(context: EvaluationContext, loader: ResumableLoader) -> Objects:
    """Return the objects that a step of an evaluation may change; no snapshot holds them in this form.

    Args:
        context: context of the evaluation.
        loader: loader of its batches.
    """
    loaders = _sources({"evaluation": loader})
    data = {name: owner for name, owner in _data_in(loaders).items() if not isinstance(owner, WholeData)}
    data |= {"module": source} if isinstance(source := context.trainer.datamodule, DataModule) else {}
    callbacks = {str(n): callback for n, callback in enumerate(context.callbacks) if is_user_class(type(callback))}
    holders = [context.module, *context.module.modules(), *context.callbacks, *data.values()]

    def roots() -> Iterator[Root]:
        yield from module_roots(context.module)
        yield Root("trainer", "", context.trainer.set_by_users(), context.trainer, is_setup=True)
        for number, callback in callbacks.items():
            yield Root("callbacks", number, attributes_of(callback), callback, is_setup=True)
        for name, owner in data.items():
            yield Root("data", name, attributes_of(owner), owner, is_setup=True, is_data=True)
        yield from _global_generators(holders)

    def anchors() -> dict[str, object]:
        named: dict[str, object] = {"trainer": context.trainer, **module_anchors(context.module)}
        named |= {f"callback {number}": callback for number, callback in callbacks.items()}
        return named | {f"data {name}": owner for name, owner in data.items()} | loaders

    return Objects(roots, anchors, context.device, is_kept=False)


def _unsaved_values(context: FitContext, data: Mapping[str, Any], objects: Objects) -> Iterator[tuple[str, object]]:
    """Yield names and values that no snapshot holds: class attributes, globals, state of the process, large data."""
    holders = [context.module, *context.module.modules(), *context.callbacks, *data.values()]
    for name, value in class_and_global_state(holders, objects.kinds):
        if _is_plain(value) and all(value is not one for one in holders):
            yield name, value
    yield from process_state({*map(type, holders), *objects.kinds})
    for path, value in objects.watched.items():
        yield path.replace("/", "."), value
    for name, loader in _loaders(context.loaders).items():
        if isinstance(loader, DataLoader) and not dict(data_owners(name, loader.dataset)):
            yield f"data.{name}.dataset", _readable_values(loader.dataset)


def classes_of(context: FitContext) -> set[type]:
    """Return the classes of the module and its submodules, callbacks, data and samplers of a fit."""
    data, loaders = _data_of(context.loaders, context.source), _loaders(context.loaders)
    return {*map(type, (*context.module.modules(), *context.callbacks, *data.values(), *loaders.values()))}


def _readable_values(dataset: Any) -> object:
    """Return a library's data set as far as it can be digested: itself, or its attributes with plain values."""
    if is_counted_in(dataset):
        return dataset
    return {name: value for name, value in getattr(dataset, "__dict__", {}).items() if type(value) in PLAIN}


def _is_plain(value: object) -> bool:
    """Return whether `value` is of Python or a known library, or a user's object but no module, callback or data."""
    if is_user_class(type(value)):
        return not isinstance(value, (nn.Module, Callback, DataModule, Dataset))
    return is_counted_in(value)


def _data_of(fit_loaders: FitLoaders, source: object) -> dict[str, Any]:
    """Return the objects by name that data are read from in the main process."""
    found: dict[str, Any] = {"module": source} if isinstance(source, DataModule) else {}
    return found | _data_in(_loaders(fit_loaders))


def _data_in(loaders: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, loader in loaders.items():
        if isinstance(loader, DataLoader):
            found |= data_owners(name, loader.dataset)
    return found


class _SamplerValues:
    """Attributes of users' samplers that are not in the samplers' states, which loaders save.

    Args:
        fit_loaders: loaders of the samplers.
    """

    def __init__(self, fit_loaders: FitLoaders) -> None:
        self._fit_loaders = fit_loaders
        self._names: dict[str, set[str]] = {}
        self._found: list[tuple[str, Any, dict[str, Any]]] | None = None

    def anchors(self) -> dict[str, object]:
        """Return the samplers and the objects that they wrap, by name; `roots` is called next."""
        self._found = list(self._find())
        return {where: owner for where, owner, _ in self._found}

    def roots(self) -> Iterator[Root]:
        """Yield the attributes; an attribute that was yielded once is yielded again, even if its type has changed."""
        found, self._found = self._found, None
        for where, owner, values in self._find() if found is None else found:
            names = self._names.setdefault(where, set())
            names |= values.keys()
            now = {one: value for one, value in attributes_of(owner).items() if one in names}
            yield Root("samplers", where, now, owner, is_setup=True, is_data=True)

    def _find(self) -> Iterator[tuple[str, Any, dict[str, Any]]]:
        """Yield samplers and the objects that they wrap: name, object, and its attributes that are in no state."""
        for name, loader in _loaders(self._fit_loaders).items():
            if not isinstance(loader, DataLoader):
                continue
            for kind in ("batch_sampler", "sampler"):
                if is_user_class(type(sampler := getattr(loader, kind, None))):
                    for path, owner, values in graph_attributes(sampler, loader.dataset):
                        yield f"{kind} of {name} {path}".strip(), owner, values


def _loader_roots(fit_loaders: FitLoaders) -> Iterator[Root]:
    """Yield the attributes that users set on loaders."""
    for name, loader in _loaders(fit_loaders).items():
        if isinstance(loader, DataLoader):
            yield Root("loaders", name, loader_attributes(loader), loader, is_setup=True, is_data=True)


def _loaders(fit_loaders: FitLoaders) -> dict[str, Any]:
    """Return every loader and sampler of `fit_loaders`, by name."""
    validation = {f"validation {n}": resumable for n, resumable in enumerate(fit_loaders.validation)}
    return _sources({"training": fit_loaders.training, **validation})


def _sources(named: Mapping[str, ResumableLoader]) -> dict[str, Any]:
    loaders: dict[str, Any] = {}
    for name, resumable in named.items():
        several = _resumable_leaves(resumable)
        loaders |= {name if len(several) == 1 else f"{name} {n}": leaf.source for n, leaf in enumerate(several)}
    samplers = {}
    for name, loader in loaders.items():
        for kind in ("batch_sampler", "sampler"):
            if isinstance(loader, DataLoader) and getattr(loader, kind, None) is not None:
                samplers[f"{kind} of {name}"] = getattr(loader, kind)
    return {**loaders, **samplers}


def _resumable_leaves(resumable: Any) -> list[Any]:
    loaders = getattr(resumable, "loaders", None)
    found = [resumable] if loaders is None else [leaf for inner in loaders for leaf in _resumable_leaves(inner)]
    return [leaf for leaf in found if getattr(leaf, "source", None) is not None]


def _callback_roots(callbacks: Mapping[str, Callback]) -> Iterator[Root]:
    """Yield the attributes of users' callbacks; callbacks with a `state_dict` of their own have none here."""
    for name, callback in callbacks.items():
        if is_user_class(type(callback)):
            is_kept = type(callback).state_dict is not Callback.state_dict
            yield Root("callbacks", name, {} if is_kept else attributes_of(callback), callback, is_setup=True)


def _optimizer_roots(context: FitContext) -> Iterator[Root]:
    """Yield the attributes of optimizers and schedulers that their `state_dict` does not hold."""
    for number, optimizer in enumerate(context.optimizers):
        beside = {
            name: value
            for name, value in attributes_of(optimizer).items()
            if name not in _OPTIMIZER_ATTRIBUTES and not name.endswith("_hooks")
        }
        yield Root("optimizers", str(number), beside, optimizer, is_setup=True)
        yield Root("hooks", f"optimizer {number}", user_hooks(optimizer, _OPTIMIZER_HOOKS))
    for number, config in enumerate(context.schedulers):
        yield from _scheduler_roots(config.scheduler, str(number))


#: attributes with users' functions, which `state_dict` of LambdaLR, MultiplicativeLR and CyclicLR leaves out
_SCHEDULER_FUNCTIONS = ("lr_lambdas", "_scale_fn_custom")


def _scheduler_roots(scheduler: Any, name: str) -> Iterator[Root]:
    functions = {key: value for key in _SCHEDULER_FUNCTIONS if (value := getattr(scheduler, key, None)) is not None}
    if functions:
        yield Root("schedulers", name, functions)
    elif found := scheduler_objects(scheduler):
        yield Root("schedulers", name, found, scheduler)
    inner = [one for key in ("_schedulers", "schedulers") for one in getattr(scheduler, key, ())]
    for number, one in enumerate(inner):
        yield from _scheduler_roots(one, f"{name}.{number}")


def _global_generators(owners: list[Any]) -> Iterator[Root]:
    """Yield random number generators in attributes of the owners' classes and in globals of the modules they use."""
    kinds = dict.fromkeys(kind for owner in owners for kind in type(owner).__mro__ if is_user_class(kind))
    modules = user_modules(kinds)
    named = (value for module in modules for value in vars(module).values())
    kinds |= dict.fromkeys(value for value in named if isinstance(value, type) and is_user_class(value))
    namespaces: dict[str, Any] = {f"{kind.__module__}:{kind.__qualname__}": kind for kind in kinds}
    namespaces |= {module.__name__: module for module in modules}
    for name, namespace in namespaces.items():
        if generators := {key: value for key, value in vars(namespace).items() if is_generator(value)}:
            yield Root("globals", name, generators)
