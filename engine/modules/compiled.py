"""Modules wrapped by `torch.compile`, compiled in place: names and state stay the module's.

A run can resume with compilation switched on or off, and weights have the same names in both cases.
"""

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.container import ModuleDict, ModuleList

from midstride.engine.errors import UserError
from midstride.engine.modules.torch_internals import children_of, compile_calls, is_compiled, wrapped_by_compile

if TYPE_CHECKING:
    from midstride.engine.config.options import CompileOptions

__all__ = ["compile_in_place", "compile_layers_in_place", "compile_module", "is_compiled_anywhere"]

_CACHE = "TORCHINDUCTOR_CACHE_DIR"


def compile_module(module: nn.Module, options: "CompileOptions") -> None:
    """Compile the calls of `module` and of its layers.

    Compiled code is kept in the user's cache folder, so that another attempt need not compile it again.

    Raises:
        UserError: torch refuses the options.
    """
    if _CACHE not in os.environ:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        os.environ[_CACHE] = str(caches / "midstride" / "inductor")
    try:
        for layer in [module, *_layers_of(module)]:
            if not is_compiled(layer):
                compile_calls(layer, partial(torch.compile, **options.model_dump(exclude_none=True)))
    except Exception as error:  # torch's own, such as InvalidBackend
        raise UserError(f"compile: {error}") from error


def _layers_of(module: nn.Module) -> list[nn.Module]:
    """Return the layers with parameters that the module may call; lists are not called."""
    found: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, (ModuleList, ModuleDict)):
            found += _layers_of(child)
        elif next(child.parameters(), None) is not None:
            found.append(child)
    return found


def is_compiled_anywhere(module: nn.Module) -> bool:
    """Return whether calls of `module` or of a layer in it are compiled."""
    return any(is_compiled(layer) for layer in module.modules())


def compile_in_place(module: Any) -> Any:
    """Return the module in a wrapper of `torch.compile`, with compiled calls; others unchanged."""
    found = wrapped_by_compile(module)
    if found is None:
        return module
    inner, compiler = found
    compile_calls(inner, compiler)
    return inner


def compile_layers_in_place(module: nn.Module) -> None:
    """Replace each wrapper that `torch.compile` returned for a layer of `module` by that layer.

    A layer that the module also holds without the wrapper stays as it is: its own calls are not compiled.
    """
    for owner in [*module.modules()]:
        for name, layer in [*children_of(owner).items()]:
            if (found := wrapped_by_compile(layer)) is not None and not _is_elsewhere(module, layer, found[0]):
                children_of(owner)[name] = compile_in_place(layer)


def _is_elsewhere(module: nn.Module, wrapper: Any, inner: nn.Module) -> bool:
    """Return whether `module` holds the layer `inner` outside its wrapper."""
    return any(child is inner for owner in module.modules() if owner is not wrapper for child in owner.children())
