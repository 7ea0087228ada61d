"""Roots of a run's objects: data, samplers, loaders, optimizers, schedulers, generators."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from midstride.engine.code_origin import is_user_class, module_of
from midstride.engine.data.data_owners import WholeData, data_owners
from midstride.engine.data.loader import ResumableLoader
from midstride.engine.data.sampler_state import graph_attributes
from midstride.engine.data.worker_data import loader_attributes
from midstride.engine.objects.attributes import attributes_of, own_dict
from midstride.engine.objects.kinds.generators import is_generator
from midstride.engine.objects.kinds.plain import PLAIN
from midstride.engine.objects.object_state import Objects
from midstride.engine.objects.roots import Root, class_and_global_state, is_counted_in, process_state, user_hooks
from midstride.engine.objects.user_modules import user_modules
from midstride.engine.optim.schedulers import SchedulerConfig, scheduler_objects

__all__ = [
    "SamplerValues",
    "data_in",
    "data_roots",
    "global_generators",
    "loader_roots",
    "optimizer_roots",
    "sources",
    "unsaved_values",
]

#: attributes of an optimizer that its state_dict holds or that torch sets in every process
_OPTIMIZER_ATTRIBUTES = frozenset({"state", "param_groups", "step", "zero_grad"})
_OPTIMIZER_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def unsaved_values(
    holders: Sequence[object], loaders: Mapping[str, Any], objects: Objects
) -> Iterator[tuple[str, object]]:
    """Yield names and values outside of snapshots: class attributes, globals, large data etc.

    Args:
        holders: the objects of the training.
        loaders: loaders and samplers of the training, by name.
        objects: the part of the state that holds attributes.
    """
    held = {*map(id, holders), *map(id, loaders.values())}
    for name, value in class_and_global_state(holders, objects.kinds, saved=objects.built_functions):
        if _is_readable(value) and id(value) not in held:
            yield name, value
    yield from process_state({*map(type, holders), *objects.kinds})
    for path, value in objects.watched.items():
        yield path.replace("/", "."), value
    for name, loader in loaders.items():
        if isinstance(loader, DataLoader) and not dict(data_owners(name, loader.dataset)):
            yield f"data.{name}.dataset", _readable_values(loader.dataset)


def _readable_values(dataset: Any) -> object:
    """Return a library's data set, or its plain attributes if it cannot be digested."""
    if is_counted_in(dataset):
        return dataset
    return {name: value for name, value in own_dict(dataset).items() if type(value) in PLAIN}


def _is_readable(value: object) -> bool:
    """Return whether `value` is Python's, a user's, or a library's with weights or counts."""
    kind = type(value)  # not the class that a proxy pretends to have
    if issubclass(kind, Optimizer):
        return "state" in own_dict(value)  # a wrapper shows the state of another
    return issubclass(kind, (nn.Module, LRScheduler)) or is_user_class(kind) or is_counted_in(value)


def data_in(loaders: Mapping[str, Any]) -> dict[str, Any]:
    """Return the objects by name that `loaders` read data from in the main process."""
    found: dict[str, Any] = {}
    for name, loader in loaders.items():
        if isinstance(loader, DataLoader):
            found |= data_owners(name, loader.dataset)
    return found


def data_roots(data: Mapping[str, Any]) -> Iterator[Root]:
    """Yield the attributes of `data`, without large values."""
    for name, owner in data.items():
        is_whole = isinstance(owner, WholeData)
        yield Root("data", name, attributes_of(owner), None if is_whole else owner, is_setup=True, is_data=True)


class SamplerValues:
    """Attributes of users' samplers that are not in the samplers' states, which loaders save.

    Args:
        loaders: returns the loaders and samplers, as `sources` does.
    """

    def __init__(self, loaders: Callable[[], Mapping[str, Any]]) -> None:
        self._loaders = loaders
        self._names: dict[str, set[str]] = {}
        self._found: list[tuple[str, Any, dict[str, Any]]] | None = None

    def anchors(self) -> dict[str, object]:
        """Return the samplers and the objects that they wrap, by name; `roots` is called next."""
        self._found = list(self._find())
        return {where: owner for where, owner, _ in self._found}

    def roots(self) -> Iterator[Root]:
        """Yield the attributes, and all attributes yielded before, even with another type."""
        found, self._found = self._found, None
        for where, owner, values in self._find() if found is None else found:
            names = self._names.setdefault(where, set())
            names |= values.keys()
            now = {one: value for one, value in attributes_of(owner).items() if one in names}
            yield Root("samplers", where, now, owner, is_setup=True, is_data=True)

    def _find(self) -> Iterator[tuple[str, Any, dict[str, Any]]]:
        """Yield samplers and the objects they wrap: name, object, and its unsaved attributes."""
        for name, loader in self._loaders().items():
            if not isinstance(loader, DataLoader):
                continue
            for kind in ("batch_sampler", "sampler"):
                if is_user_class(type(sampler := getattr(loader, kind, None))):
                    for path, owner, values in graph_attributes(sampler, loader.dataset):
                        yield f"{kind} of {name} {path}".strip(), owner, values


def loader_roots(loaders: Mapping[str, Any]) -> Iterator[Root]:
    """Yield the attributes that users set on loaders."""
    for name, loader in loaders.items():
        if isinstance(loader, DataLoader):
            yield Root("loaders", name, loader_attributes(loader), loader, is_setup=True, is_data=True)


def sources(named: Mapping[str, ResumableLoader]) -> dict[str, Any]:
    """Return every loader and sampler that `named` are made from, by name."""
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


def optimizer_roots(optimizers: Iterable[Optimizer], schedulers: Iterable[SchedulerConfig]) -> Iterator[Root]:
    """Yield the attributes of optimizers and schedulers that their `state_dict` does not hold."""
    for number, optimizer in enumerate(optimizers):
        beside = {
            name: value
            for name, value in attributes_of(optimizer).items()
            if name not in _OPTIMIZER_ATTRIBUTES and not name.endswith("_hooks")
        }
        yield Root("optimizers", str(number), beside, optimizer, is_setup=True)
        yield Root("hooks", f"optimizer {number}", user_hooks(optimizer, _OPTIMIZER_HOOKS))
    for number, config in enumerate(schedulers):
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


def global_generators(owners: Iterable[Any]) -> Iterator[Root]:
    """Yield generators in attributes of the owners' classes and in globals of their modules."""
    owned = dict.fromkeys(map(type, owners))
    kinds = dict.fromkeys(kind for owner in owned for kind in owner.__mro__ if is_user_class(kind))
    modules = user_modules(kinds)
    named = (value for module in modules for value in vars(module).values())
    kinds |= dict.fromkeys(value for value in named if isinstance(value, type) and is_user_class(value))
    namespaces: dict[str, Any] = {f"{module_of(kind)}:{kind.__qualname__}": kind for kind in kinds}
    namespaces |= {module.__name__: module for module in modules}
    for name, namespace in namespaces.items():
        if generators := {key: value for key, value in vars(namespace).items() if is_generator(value)}:
            yield Root("globals", name, generators)
