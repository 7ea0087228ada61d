"""Roots of walks: attributes and hooks, classes and globals of user code, settings."""

import functools
import linecache
import os
import re
import types
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import chain, islice
from operator import is_
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from midstride.engine.code_origin import is_user_class, is_user_file, is_user_module, module_of
from midstride.engine.metrics.torchmetrics_state import is_metric, objects_in
from midstride.engine.objects.attributes import INTERNAL, attributes_of, has_slots, set_attribute
from midstride.engine.objects.kinds.functions import Cached, is_users_cache
from midstride.engine.objects.kinds.generators import Generator
from midstride.engine.objects.kinds.plain import PLAIN
from midstride.engine.objects.user_modules import user_modules
from midstride.engine.objects.walk import LOWEST_ADDRESS, GraphWalk
from midstride.engine.state.module_index import Members

__all__ = [
    "CODE",
    "EveryOwner",
    "QuietOwners",
    "Root",
    "class_and_global_state",
    "function_values",
    "is_code",
    "is_counted_in",
    "is_data",
    "is_user_hook",
    "module_anchors",
    "module_hooks",
    "module_roots",
    "process_state",
    "user_hooks",
]

#: what the engine sets itself on a module, and torch on a recurrent layer: weak references to its weights
_OURS = frozenset({"_trainer", "device", "_is_replica", "_compiled_call_impl", "_flat_weight_refs"}) | INTERNAL
#: how the names begin under which torch's fully_shard and checkpoint keep state on modules; each attempt sets it up
_COMPOSABLE = ("__composable_api_state_key", "_is_fsdp_managed_module", "_fsdp_use_orig_params")
#: classes of tensors whose attributes are walked; other classes manage their attributes themselves
_TENSORS = (Tensor, nn.Parameter, nn.Buffer)
_HOOKS = tuple(sorted(name for name in INTERNAL if name.endswith("_hooks")))
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def _path(group: str, name: str) -> str:
    return f"{group}/{name}" if name else group


@dataclass
class Root:
    """The attributes of one object, where a walk begins.

    Args:
        group: kind of owner, such as "module".
        name: name of the owner in its group.
        values: current attributes.
        owner: object to set attributes on; None if values are only filled in place.
        is_setup: whether every attempt sets them up in the same way, so that state is only the difference.
        is_data: whether large values are left out.
    """

    group: str
    name: str
    values: Mapping[str, Any]
    owner: Any = None
    is_setup: bool = False
    is_data: bool = False

    @property
    def path(self) -> str:
        """Path of the owner, a prefix of the paths of its attributes."""
        return _path(self.group, self.name)

    @property
    def is_ordered(self) -> bool:
        """Whether the order in which the attributes were set is restored."""
        return not (self.is_setup or self.is_data or self.owner is None)

    def nodes(self, walk: GraphWalk) -> dict[str, Any]:
        """Return the attributes' nodes, in the order of setting if it is restored, else by name."""
        return walk.root_attributes(self.values, self.path, is_small=self.is_data, is_ordered=self.is_ordered)

    def by_path(self, nodes: Mapping[str, Any]) -> dict[str, Any]:
        """Return nodes of the attributes, which are by name, by path."""
        return {f"{self.path}/{name}": node for name, node in nodes.items()}

    def by_name(self, nodes: Mapping[str, Any]) -> dict[str, Any]:
        """Return nodes of the attributes, which are by path, by name."""
        return {path.removeprefix(f"{self.path}/"): node for path, node in nodes.items()}

    def set(self, name: str, value: Any) -> None:
        """Set an attribute of the owner, past any `__setattr__`; without an owner, do nothing."""
        if self.owner is not None:
            set_attribute(self.owner, name, value)


def module_roots(members: Members, quiet: "QuietOwners | None" = None) -> Iterator[Root]:
    """Yield the attributes of a module and its submodules, and the user's hooks on them.

    Args:
        members: members of the module.
        quiet: owners that are left out while their attributes are as they were.
    """
    quiet = QuietOwners() if quiet is None else quiet
    for path, submodule in quiet.loud_modules(members.modules):
        if is_metric(submodule):  # what else it holds is in a part of its own
            yield Root("metrics", path, objects_in(submodule), submodule, is_setup=True)
            continue
        kind: type = type(submodule)
        if kind is not DistributedDataParallel:  # each attempt makes the parts of one
            ours, found = _ours(kind), attributes_of(submodule).items()
            own = {name: value for name, value in found if name not in ours and not _is_of_sharding(name, value)}
            yield Root("module", path, own, submodule, is_setup=not is_user_class(type(submodule)))
        if hooks := module_hooks(submodule):
            yield Root("hooks", path, hooks)
    for name, tensor in quiet.loud_tensors(chain(members.parameters.items(), members.buffers.items())):
        yield from _tensor_roots(name, tensor)


def _is_of_sharding(name: str, value: object) -> bool:
    """Return whether torch's sharding or checkpointing set the attribute, as it wraps steps."""
    if name.startswith(_COMPOSABLE):
        return True
    function = value.__func__ if type(value) is types.MethodType else None
    module = function.__globals__["__name__"] if isinstance(function, types.FunctionType) else ""
    return module.startswith("torch.distributed.fsdp.")


def _tensor_roots(name: str, tensor: Tensor) -> Iterator[Root]:
    """Yield the hooks of a parameter or buffer, and the attributes that user code has set on it."""
    if hooks := user_hooks(tensor, _TENSOR_HOOKS):
        yield Root("hooks", f"tensor {name}", hooks)
    if type(tensor) in _TENSORS:
        set_on = {key: value for key, value in vars(tensor).items() if not key.startswith("_")}
        yield Root("tensors", name, set_on, tensor, is_setup=True)


@lru_cache(maxsize=1024)  # asked for each layer at every snapshot
def _ours(kind: type) -> frozenset[str]:
    """Return the names of attributes that are no state in modules of the class `kind`."""
    return _OURS | getattr(kind, "not_state", frozenset())


#: class of a layer, names of all of its attributes, names and values of those that are state
_Layer = tuple[type, list[str], list[str], list[Any]]


class QuietOwners:
    """Layers and tensors that walks leave out while their attributes are as built.

    These are layers of libraries with plain values only, and tensors without attributes: most of a large module.
    """

    def __init__(self, layers: dict[str, _Layer] | None = None, tensors: dict[str, type] | None = None) -> None:
        self._layers: dict[str, _Layer] = {} if layers is None else layers
        self._tensors: dict[str, type] = {} if tensors is None else tensors

    def add(self, root: Root) -> None:
        """Record the owner of `root`, whose attributes are as they were built."""
        owner, values = root.owner, [*root.values.values()]
        if root.group == "tensors" and not vars(owner):
            self._tensors[root.name] = type(owner)
        if root.group == "module" and root.is_setup and not has_slots(owner) and all(map(_is_small_and_plain, values)):
            self._layers[root.name] = type(owner), [*vars(owner)], [*root.values], values

    def without(self, paths: Container[str]) -> "QuietOwners":
        """Return these owners without those at the `paths` of roots."""
        layers = {name: one for name, one in self._layers.items() if _path("module", name) not in paths}
        return QuietOwners(
            layers, {name: kind for name, kind in self._tensors.items() if f"tensors/{name}" not in paths}
        )

    def loud_modules(self, modules: Mapping[str, nn.Module]) -> list[tuple[str, nn.Module]]:
        """Return the layers that are not recorded, have hooks, or have other attributes than before."""
        return [(path, module) for path, module in modules.items() if not self._is_quiet(path, module)]

    def _is_quiet(self, path: str, module: nn.Module) -> bool:
        known, own = self._layers.get(path), vars(module)
        if known is None or type(module) is not known[0] or [*own] != known[1]:
            return False
        return all(map(is_, map(own.get, known[2]), known[3])) and not any(map(own.get, _HOOKS))

    def loud_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Return the tensors that are not recorded, or have attributes or hooks now."""
        known, (hooks, grad_hooks) = self._tensors, _TENSOR_HOOKS
        return [
            (name, tensor)
            for name, tensor in tensors
            if known.get(name) is not type(tensor)
            or vars(tensor)
            or getattr(tensor, hooks)
            or getattr(tensor, grad_hooks, None)
        ]


class EveryOwner(QuietOwners):
    """Every layer and tensor counts as quiet: for walks in data alone."""

    def loud_modules(self, modules: Mapping[str, nn.Module]) -> list[tuple[str, nn.Module]]:
        """Return none."""
        return []

    def loud_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Return none."""
        return []


def _is_small_and_plain(value: object) -> bool:
    """Return whether `value` is immutable, and no number that could be the address of an object."""
    if type(value) is tuple:  # such as the sizes of a convolution
        return all(map(_is_small_and_plain, value))
    return type(value) in PLAIN and not (type(value) is int and value > LOWEST_ADDRESS)


def module_anchors(members: Members) -> dict[str, object]:
    """Return submodules and tensors of a module in other parts of the state, by name."""
    named: dict[str, object] = {f"module {path}": submodule for path, submodule in members.modules.items()}
    tensors = members.parameters | members.buffers
    return {**{f"tensor {name}": tensor for name, tensor in tensors.items()}, **named}


def module_hooks(module: nn.Module) -> dict[str, Any]:
    """Return the hooks of one module that are user code, by their names of registration."""
    return user_hooks(module, _HOOKS)


def user_hooks(owner: object, names: Sequence[str]) -> dict[str, Any]:
    """Return the hooks of `owner` that are user code, by their names of registration.

    They are numbered without torch's own hooks, whose number differs between attempts.
    """
    if not any(getattr(owner, name, None) for name in names):
        return {}
    registered = [(name, hook) for name in names for hook in (getattr(owner, name, None) or {}).values()]
    theirs = [(name, hook) for name, hook in registered if is_user_hook(hook)]
    return {f"{name}_{number}": hook for number, (name, hook) in enumerate(theirs)}


def is_user_hook(hook: Any) -> bool:
    """Return whether `hook` is user code."""
    function = getattr(hook, "__func__", hook)
    if isinstance(function, types.FunctionType):
        return is_user_file(function.__code__.co_filename)
    return is_user_class(type(function))


#: modules of classes that user code uses as counters and containers
_COUNTED_IN = frozenset(
    {
        *("builtins", "collections", "itertools", "weakref", "_contextvars", "array", "ctypes", "queue", "_queue"),
        *("functools", "threading", "_thread", "multiprocessing.sharedctypes", "decimal", "fractions", "datetime"),
        *("numpy", "torch", "torch.nn.parameter", "pandas", "pandas.core.frame", "pandas.core.series"),
        "torch.amp.grad_scaler",
    }
)

#: functions, classes, modules and descriptors, also those that Python makes in a class, such as those of slots
CODE = (
    *(type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType),
    *(classmethod, staticmethod, property, functools.cached_property),
    *(types.MemberDescriptorType, types.GetSetDescriptorType, types.WrapperDescriptorType),
)


#: how deep functions in closures of functions are followed
_CLOSURES = 4


def class_and_global_state(
    objects: Iterable[object], classes: Iterable[type] = (), *, saved: Iterable[object] = ()
) -> Iterator[tuple[str, object]]:
    """Yield names and values held by the user's code around `objects` and `classes`.

    These are attributes of their classes; and in the user's modules that these classes and their code name: globals
    (functions included), attributes of classes, and defaults, attributes, closures and caches of functions. A partial
    or bound method in their place holds its arguments or its object. Users' functions in `saved` are left out,
    with what they hold.
    """
    kinds = {kind for one in {*map(type, objects), *classes} for kind in one.__mro__ if is_user_class(kind)}
    modules = user_modules(kinds)
    named = [value for module in modules for value in [*vars(module).values()]]
    kinds.update(value for value in named if isinstance(value, type) and is_user_class(value))
    for kind in sorted(kinds, key=lambda kind: (module_of(kind), kind.__qualname__)):
        yield from _of_class(kind)
    functions = dict.fromkeys(code for code in map(_code_of, named) if isinstance(code, types.FunctionType))
    known = {*map(id, saved)}
    for function in functions:
        if id(function) not in known or not is_user_file(function.__code__.co_filename):
            yield from _of_function(function)
    for module in modules:
        for name, value in [*vars(module).items()]:  # a thread may add others meanwhile
            is_function = isinstance(value, types.FunctionType) or is_users_cache(value)
            if not name.startswith("__") and (is_function or is_data(value) or _is_alias(name, value)):
                yield f"global {module.__name__}.{name}", value
            yield from _bound_to(value, f"global {module.__name__}.{name}")


def is_counted_in(value: object) -> bool:
    """Return whether `value` is of a Python or library class in which user code counts."""
    return type(value).__module__ in _COUNTED_IN and not isinstance(value, Generator)


def is_code(value: object) -> bool:
    """Return whether `value` is code: a function, class, module, or descriptor."""
    return isinstance(value, CODE)


def is_data(value: object) -> bool:
    """Return whether `value` is data rather than code, as modules and users' callables are."""
    kind = type(value)  # not the class that a proxy pretends to have
    return not is_code(value) and (is_user_class(kind) or issubclass(kind, nn.Module) or not callable(value))


def _is_alias(name: str, value: object) -> bool:
    """Return whether `name` is an alias for a class or C function, which code may replace."""
    return isinstance(value, (type, types.BuiltinFunctionType)) and value.__name__ != name


def _of_class(kind: type) -> Iterator[tuple[str, object]]:
    name = f"class {kind.__qualname__}"
    if issubclass(kind, Enum):
        yield from ((f"{name}: {member.name}", member) for member in kind)
        return
    for key, value in [*vars(kind).items()]:
        function = _function_of(value)
        if isinstance(function, types.FunctionType) or is_users_cache(function):
            yield f"{name}: {key}", function
            yield from _of_function(_code_of(function))
        elif not key.startswith("__") and (is_data(value) or _is_alias(key, value)):
            yield f"{name}: {key}", value
        yield from _bound_to(value, f"{name}: {key}")


def _function_of(attribute: Any) -> Any:
    """Return the function of a static, class or dispatching method, or `attribute` itself."""
    if isinstance(attribute, functools.singledispatchmethod):
        return attribute.dispatcher  # its closure holds the implementations
    return attribute.__func__ if isinstance(attribute, (classmethod, staticmethod)) else attribute


def _bound_to(value: Any, name: str) -> Iterator[tuple[str, object]]:
    """Yield the data held by a partial, or by a method of an object of the user."""
    if isinstance(value, functools.partial):
        yield from _bound_to(value.func, f"{name}: function")
        for key, argument in (*enumerate(value.args), *value.keywords.items()):
            if is_data(argument):
                yield f"{name}: argument {key}", argument
    elif isinstance(value, types.MethodType) and is_user_class(type(value.__self__)):
        yield f"{name}: object", value.__self__


def _code_of(value: Any) -> Any:
    return value.__wrapped__ if isinstance(value, Cached) else value


def function_values(function: types.FunctionType) -> dict[str, object]:
    """Return the values that a function holds: defaults, attributes and closure."""
    code = function.__code__
    names = code.co_varnames[: code.co_argcount]
    defaults = function.__defaults__ or ()
    values: dict[str, object] = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
    values |= {**(function.__kwdefaults__ or {}), **vars(function)}
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    return values | {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}


def _of_function(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    file, module = function.__code__.co_filename, str(function.__module__)  # code can set another value
    name = f"function {function.__qualname__}"
    if is_user_file(file):
        yield name, function
    if is_user_file(file) or is_user_module(module):
        yield from _held_by(function, name, file)


def _held_by(
    function: types.FunctionType, name: str, library: str, deep: int = _CLOSURES
) -> Iterator[tuple[str, object]]:
    """Yield the data that a function holds, and functions in its closure.

    Args:
        function: one of the user's, or of a library's decorator, where only registries count.
        name: of the function in names of values.
        library: file of code that is followed besides the user's.
        deep: closures that are followed.
    """
    own, is_users = function.__code__.co_freevars, is_user_file(function.__code__.co_filename)
    for key, value in function_values(function).items():
        if isinstance(value, types.FunctionType):
            file = value.__code__.co_filename
            if deep and key in own and (file == library or is_user_file(file)):
                yield from _held_by(value, f"{name}: {key}", library, deep - 1)
        elif is_data(value) if is_users else key in own and _is_registry(value):
            yield f"{name}: {key}", value


def _is_registry(value: Any) -> bool:
    """Return whether a container holds functions; one with other values may be a cache."""
    if not isinstance(value, (dict, list, set)):
        return False
    items: list[Any] = [*islice(value.values() if isinstance(value, dict) else value, 1)]
    return isinstance(items[0], types.FunctionType) if items else False


#: settings of torch that change the bits of a training
_SETTINGS: tuple[Callable[[], object], ...] = (
    torch.get_default_dtype,
    torch.get_default_device,
    torch.get_float32_matmul_precision,
    torch.are_deterministic_algorithms_enabled,
)


def process_state(classes: Iterable[type]) -> Iterator[tuple[str, object]]:
    """Yield settings by name.

    Environment variables and functions only if user code around `classes` names them.
    """
    for setting in _SETTINGS:
        yield f"torch.{setting.__name__}()", str(setting())
    modules = user_modules(classes)
    sources = ["".join(linecache.getlines(getattr(module, "__file__", None) or "")) for module in modules]
    variables = tuple(os.environ)
    named = frozenset[str]().union(*(_named_in(source, variables) for source in sources))
    for name, value in os.environ.items():
        if name in named:  # libraries set others, which no training step reads
            yield f"environment variable {name}", xxhash.xxh3_64_hexdigest(value.encode(errors="surrogateescape"))[:6]
    functions = (_functions_of_libraries(*of) for of in zip(modules, sources, strict=True))
    yield from {name: function for found in functions for name, function in found}.items()


@lru_cache(maxsize=256)  # asked at many snapshots
def _named_in(source: str, names: tuple[str, ...]) -> frozenset[str]:
    return frozenset(name for name in names if name in source)


def _functions_of_libraries(module: types.ModuleType, source: str) -> Iterator[tuple[str, object]]:
    """Yield library functions named by `source`, such as `F.relu`, which user code may replace."""
    libraries = tuple(
        name
        for name, value in [*vars(module).items()]
        if isinstance(value, types.ModuleType) and not is_user_module(value.__name__)
    )
    for path in _paths(source, libraries):
        library: Any = module
        found: Any = module
        for name in path.split("."):
            library, found = found, vars(found).get(name) if isinstance(found, types.ModuleType) else None
        if isinstance(found, types.BuiltinFunctionType | types.FunctionType):
            kind = found if isinstance(found, types.FunctionType) else found.__qualname__
            yield f"library function {library.__name__}.{path.rpartition('.')[2]}", kind


@lru_cache(maxsize=256)  # asked at many snapshots
def _paths(source: str, names: tuple[str, ...]) -> list[str]:
    """Return the dotted paths in `source` that begin with one of `names`, such as `F.relu`."""
    return sorted(set(re.findall(rf"\b(?:{'|'.join(names)})(?:\.\w+)+", source))) if names else []
