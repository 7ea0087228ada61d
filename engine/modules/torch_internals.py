"""Private names of `torch.nn`, used here only.

`tests/unit/test_internals.py` tests each of them.
"""

import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "TorchDispatchMode",
    "buffers_of",
    "children_of",
    "compile_calls",
    "gradient_hooks_of",
    "is_compiled",
    "is_hooked",
    "is_on",
    "keeps_state_as_torch",
    "load_state_dict",
    "parameters_of",
    "transient_buffers",
    "uncompiled",
    "wrapped_by_compile",
]

#: where torch keeps the class that `torch.compile` returns for a module; imported with the first of them
_COMPILE = "torch._dynamo.eval_frame"
#: how torch loads the state of a module, unless its class or a library has a way of its own
_LOAD_STATE_DICT = nn.Module.load_state_dict
#: methods of modules that save and load their state, and their hooks on that
_STATE_METHODS = frozenset(
    [
        *("state_dict", "load_state_dict", "_save_to_state_dict", "_load_from_state_dict"),
        *("get_extra_state", "set_extra_state", "__getattr__"),
    ]
)
_STATE_HOOKS = (
    *("_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
_MOVES = frozenset({"to", "_apply"})


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the module's own parameters, as the dict itself, which can be changed."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the module's own buffers: the dict itself, to be changed."""
    return module._buffers


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the module's children: the dict itself, to be changed."""
    return module._modules


def gradient_hooks_of(wrapped: DistributedDataParallel) -> list[tuple[Callable[..., Any], object]]:
    """Return the hooks that exchange gradients, each with the state it is called with."""
    return [*wrapped._comm_hooks]


def is_hooked(module: nn.Module) -> bool:
    """Return whether calling `module` itself, not its children, calls more than its forward."""
    forward = module._forward_pre_hooks or module._forward_hooks
    return bool(forward or module._backward_pre_hooks or module._backward_hooks)


def wrapped_by_compile(module: object) -> tuple[nn.Module, Callable[..., Any]] | None:
    """Return the module given to `torch.compile`, and its compiler; None for other objects."""
    library = sys.modules.get(_COMPILE)
    if library is None or not isinstance(module, library.OptimizedModule):
        return None
    wrapper: Any = module
    return wrapper._orig_mod, wrapper.dynamo_ctx


def compile_calls(module: nn.Module, compiler: Callable[..., Any]) -> None:
    """Compile calls of `module`, by a compiler of `torch.compile` or `wrapped_by_compile`.

    torch compiles no frame of its own code, as of nn.Sequential: the function here gives it one.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    module._compiled_call_impl = compiler(call)


def is_compiled(module: nn.Module) -> bool:
    """Return whether calls of `module` itself are compiled."""
    return module._compiled_call_impl is not None


def transient_buffers(module: nn.Module) -> set[str]:
    """Return the set of the module's own buffers outside its state_dict, which can be changed."""
    return module._non_persistent_buffers_set


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module that `torch.compile` has wrapped; `module` itself if it was not."""
    found = wrapped_by_compile(module)
    return module if found is None else found[0]


def keeps_state_as_torch(modules: Collection[nn.Module]) -> bool:
    """Return whether torch's methods save and load the state of `modules`, without hooks."""
    own = [*map(vars, modules)]
    return _have_torchs(modules, _STATE_METHODS) and not any(any(one.get(name) for one in own) for name in _STATE_HOOKS)


def is_on(module: nn.Module, device: torch.device) -> bool:
    """Return whether `module.to(device)` would change nothing."""
    modules = [*module.modules()]
    if not _have_torchs(modules, _MOVES):
        return False
    parameters = [one for part in modules for one in part._parameters.values() if one is not None]
    buffers = [one for part in modules for one in part._buffers.values()]
    grads = [parameter.grad for parameter in parameters]
    return {one.device for one in (*parameters, *buffers, *grads) if one is not None} <= {device}


def _have_torchs(modules: Collection[nn.Module], methods: frozenset[str]) -> bool:
    """Return whether the `methods` of all `modules` are torch's own."""
    kinds: set[type[nn.Module]] = {*map(type, modules)}
    found = [getattr(kind, name) for kind in kinds for name in methods]
    # `functools.wraps` copies __module__, but not the names that a function sees.
    sources = [str(getattr(one, "__globals__", {}).get("__name__", "")) for one in found]
    if not all(source.startswith("torch.nn.modules.") for source in sources):
        return False
    return all(methods.isdisjoint(vars(one)) for one in modules)


def load_state_dict(module: nn.Module, weights: Mapping[str, Any], made: Set[str] = frozenset()) -> None:
    """Load `weights` as `module.load_state_dict` does, in time proportional to their number.

    For each child of a module, torch looks at the names of all weights: with 5,000 children that takes seconds. Torch
    loads modules with their own `load_state_dict`, or with hooks that run afterwards.

    Weights that name no versions of layers, as ours do not, are of the layers' present code: a layer would take them
    for those of its first version otherwise, and migrate them.

    Args:
        module: to load them into.
        weights: a state_dict of such a module.
        made: names of entries that may stay unused: the module has made them itself.

    Raises:
        RuntimeError: torch's: the weights do not fit the module.
    """
    versions = getattr(weights, "_metadata", None)
    if versions is None:
        layers = module.named_modules(remove_duplicate=False)
        versions = {path: {"version": layer._version} for path, layer in layers}
    is_plain = getattr(module.load_state_dict, "__func__", None) is _LOAD_STATE_DICT
    if (
        not is_plain
        or any(one._load_state_dict_post_hooks for one in module.modules())
        or not _load_each(module, weights, versions, made)
    ):
        if made and is_plain:
            taken = module.load_state_dict(_with_versions(weights, versions), strict=False)
            if not taken.missing_keys and {*taken.unexpected_keys} <= made:
                return
        module.load_state_dict(_with_versions(weights, versions))


def _with_versions(weights: Mapping[str, Any], versions: Mapping[str, Any]) -> "OrderedDict[str, Any]":
    """Return a copy of `weights` with the `versions` of layers, for torch and for hooks."""
    given = OrderedDict(weights)
    vars(given)["_metadata"] = versions
    return given


def _load_each(module: nn.Module, weights: Mapping[str, Any], versions: Mapping[str, Any], made: Set[str]) -> bool:
    """Load the weights that fit; return whether all do, apart from those in `made`."""
    faults: tuple[list[str], list[str], list[str]] = [], [], []

    def load(part: nn.Module, prefix: str, own: dict[str, Any]) -> None:
        part._load_from_state_dict(own, prefix, versions.get(prefix[:-1], {}), True, *faults)
        inside: dict[str, dict[str, Any]] = {}
        for key, value in own.items() if part._modules else ():
            name, dot, _ = key.removeprefix(prefix).partition(".")
            if dot:
                inside.setdefault(name, {})[key] = value
        for name, child in part._modules.items():
            if child is not None:
                load(child, f"{prefix}{name}.", inside.get(name, {}))

    load(module, "", _with_versions(weights, versions))
    missing, unexpected, errors = faults
    return not (missing or errors or {*unexpected} - made)
