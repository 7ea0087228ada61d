"""Private names of `torch.nn`, used here only.

`tests/unit/test_internals.py` tests each of them.
"""

import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "TorchDispatchMode",
    "buffers_of",
    "children_of",
    "compile_calls",
    "is_compiled",
    "is_hooked",
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


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the module's own parameters, as the dict itself, which can be changed."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the module's own buffers: the dict itself, to be changed."""
    return module._buffers


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the module's children: the dict itself, to be changed."""
    return module._modules


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


def load_state_dict(module: nn.Module, weights: Mapping[str, Any]) -> None:
    """Load `weights` as `module.load_state_dict` does, in time proportional to their number.

    For each child of a module, torch looks at the names of all weights: with 5,000 children that takes seconds. Torch
    loads modules with their own `load_state_dict`, or with hooks that run afterwards.

    Raises:
        RuntimeError: torch's: the weights do not fit the module.
    """
    is_plain = getattr(module.load_state_dict, "__func__", None) is _LOAD_STATE_DICT
    if (
        not is_plain
        or any(one._load_state_dict_post_hooks for one in module.modules())
        or not _load_each(module, weights)
    ):
        module.load_state_dict(weights)


def _load_each(module: nn.Module, weights: Mapping[str, Any]) -> bool:
    """Load the weights that fit; return whether all do."""
    versions = getattr(weights, "_metadata", None) or {}
    given = OrderedDict(weights)
    vars(given)["_metadata"] = versions  # hooks of the module itself can read it
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

    load(module, "", given)
    return not any(faults)
