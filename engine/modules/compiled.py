"""Modules wrapped by `torch.compile`, compiled in place: names and state stay the module's.

A run can resume with compilation switched on or off, and weights have the same names in both cases.
"""

from typing import Any

from torch import nn

from midstride.engine.modules.torch_internals import children_of, compile_calls, wrapped_by_compile

__all__ = ["compile_in_place", "compile_layers_in_place"]


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
