"""Which layers a module has, by path: those that are gone, and those that are one with others, in training."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from midstride.engine.modules.torch_internals import children_of

__all__ = ["Layers", "change_layers", "layer_changes", "layers_of", "own_layers", "owner_of", "set_layer"]

#: path of each child of each module -> where that layer is met first; None for a name without a layer
Layers = Mapping[str, str | None]

_GONE, _SAME, _ORDER = "gone layers", "same layers", "order of layers"


def layers_of(module: nn.Module) -> dict[str, str | None]:
    """Return the layers of `module`, itself included, as `""`; what is in one that was met before is left out."""
    first = {id(layer): path for path, layer in module.named_modules()}
    layers: dict[str, str | None] = {"": ""}
    for path, owner in module.named_modules():
        for name, child in children_of(owner).items():
            if child is None or id(child) in first:
                layers[_path(path, name)] = None if child is None else first[id(child)]
    return layers


def own_layers(layers: Layers) -> set[str]:
    """Return the paths at which a layer is met first."""
    return {path for path, first in layers.items() if path == first}


def layer_changes(built: Layers, now: Layers) -> dict[str, Any]:
    """Return how the layers differ from those that were built, new ones aside; what is empty is left out.

    Those that are gone, the topmost ones, and whether None stands for them; those that have come to be others; names in
    the order they have, where it is another one.
    """
    both = own_layers(built) & own_layers(now)
    emptied = [path for path, first in now.items() if first is None and built.get(path, path) is not None]
    away = [path for path in built if path not in now]
    found = {
        _GONE: {path: path in now for path in [*emptied, *away] if owner_of(path) in both},
        _SAME: {path: first for path, first in now.items() if first is not None and _is_other(path, built, now)},
        _ORDER: {owner: names for owner, names in _other_order(built, now).items() if owner in both},
    }
    return {name: value for name, value in found.items() if value}


def change_layers(module: nn.Module, built: Layers, state: dict[str, Any], rebuild: Callable[[], None]) -> None:
    """Let the layers of `module` differ from those that were built as `state` says; `rebuild` makes those that are new.

    In `state` stands then what `layer_changes` says, which earlier versions did not write, and which the code may have
    changed since.
    """
    _take_away(module, state.get(_GONE, {}))
    rebuild()
    _make_same(module, state.get(_SAME, {}))
    _put_in_order(module, state.get(_ORDER, {}))
    for name in (_GONE, _SAME, _ORDER):
        state.pop(name, None)
    state.update(layer_changes(built, layers_of(module)))


def _take_away(module: nn.Module, gone: Mapping[str, bool]) -> None:
    """Let layers be gone: None where that is what they became, else without their names."""
    for path, is_none in gone.items():
        owner, name = dict(module.named_modules()).get(owner_of(path)), path.rpartition(".")[2]
        if owner is not None and is_none:
            set_layer(owner, name, None)
        elif owner is not None:  # what the code does not build any more is gone as well
            children_of(owner).pop(name, None)


def _make_same(module: nn.Module, same: Mapping[str, str]) -> None:
    """Let layers be one with those that they came to be."""
    for path, first in same.items():
        set_layer(module.get_submodule(owner_of(path)), path.rpartition(".")[2], module.get_submodule(first))


def _put_in_order(module: nn.Module, order: Mapping[str, list[str]]) -> None:
    """Let the names of layers stand in the order that they had."""
    layers = dict(module.named_modules())
    for owner in order.keys() & layers.keys():
        children = children_of(layers[owner])
        for name in [name for name in order[owner] if name in children]:
            children[name] = children.pop(name)


def set_layer(owner: nn.Module, name: str, layer: nn.Module | None) -> None:
    """Set a layer, also where an attribute has its name."""
    vars(owner).pop(name, None)
    children_of(owner)[name] = layer


def _is_other(path: str, built: Layers, now: Layers) -> bool:
    return now[path] not in (path, built.get(path))


def _other_order(built: Layers, now: Layers) -> dict[str, list[str]]:
    """Return the names in each layer where they are not those that were built, and then what is new."""
    expected = {owner: [name for name in names if _path(owner, name) in now] for owner, names in _names(built).items()}
    for path in now:
        if path not in built and now[path] == path:
            expected.setdefault(owner_of(path), []).append(path.rpartition(".")[2])
    return {owner: names for owner, names in _names(now).items() if names != expected.get(owner)}


def _names(layers: Layers) -> dict[str, list[str]]:
    """Return the names in each layer, in their order."""
    names: dict[str, list[str]] = {}
    for path in list(layers)[1:]:
        names.setdefault(owner_of(path), []).append(path.rpartition(".")[2])
    return names


def _path(owner: str, name: str) -> str:
    return f"{owner}.{name}" if owner else name


def owner_of(path: str) -> str:
    """Return the path of the layer that has what is called `path`."""
    return path.rpartition(".")[0]
