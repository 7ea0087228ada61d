"""The layers of a module by path, and how they change in training: removed, shared with another path, reordered."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from midstride.engine.modules.torch_internals import children_of

__all__ = ["Layers", "change_layers", "layer_changes", "layers_of", "own_layers", "owner_of", "set_layer"]

#: path of each child of each module -> the first path of that layer in `named_modules()`; None where the child is None
Layers = Mapping[str, str | None]

_GONE, _SAME, _ORDER = "gone layers", "same layers", "order of layers"


def layers_of(module: nn.Module) -> dict[str, str | None]:
    """Return the layers of `module`, with `module` itself as `""`.

    A layer that is shared is listed under each of its paths, its children only under the first.
    """
    first = {id(layer): path for path, layer in module.named_modules()}
    layers: dict[str, str | None] = {"": ""}
    for path, owner in module.named_modules():
        for name, child in children_of(owner).items():
            if child is None or id(child) in first:
                layers[_path(path, name)] = None if child is None else first[id(child)]
    return layers


def own_layers(layers: Layers) -> set[str]:
    """Return the first path of each layer."""
    return {path for path, first in layers.items() if path == first}


def layer_changes(built: Layers, now: Layers) -> dict[str, Any]:
    """Return how the layers `now` differ from the layers that were `built`; new layers are not included.

    Keys without an entry are left out:
        "gone layers": path -> whether the child is None now (else its name is gone), for the topmost removed layers.
        "same layers": path -> first path of the layer that it shares now.
        "order of layers": path of a module -> the names of its children, where their order differs.
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
    """Apply the changes in `state`, as `layer_changes` returned them, to the layers of `module`.

    `state` is updated to the changes that hold afterwards: an earlier version may not have written them, and the code
    may build other layers since.

    Args:
        module: as this attempt built it.
        built: its layers by then.
        state: of the module's structure.
        rebuild: adds the layers that are new.
    """
    _remove_layers(module, state.get(_GONE, {}))
    rebuild()
    _share_layers(module, state.get(_SAME, {}))
    _reorder_layers(module, state.get(_ORDER, {}))
    for name in (_GONE, _SAME, _ORDER):
        state.pop(name, None)
    state.update(layer_changes(built, layers_of(module)))


def _remove_layers(module: nn.Module, gone: Mapping[str, bool]) -> None:
    """Set the layers in `gone` to None where the value is True; delete the others with their names."""
    for path, is_none in gone.items():
        owner, name = dict(module.named_modules()).get(owner_of(path)), path.rpartition(".")[2]
        if owner is not None and is_none:
            set_layer(owner, name, None)
        elif owner is not None:  # what the code does not build any more is gone as well
            children_of(owner).pop(name, None)


def _share_layers(module: nn.Module, same: Mapping[str, str]) -> None:
    """Set each path in `same` to the layer at the path that it maps to."""
    for path, first in same.items():
        set_layer(module.get_submodule(owner_of(path)), path.rpartition(".")[2], module.get_submodule(first))


def _reorder_layers(module: nn.Module, order: Mapping[str, list[str]]) -> None:
    """Reorder the children of each module in `order` by the names listed for it."""
    layers = dict(module.named_modules())
    for owner in order.keys() & layers.keys():
        children = children_of(layers[owner])
        for name in [name for name in order[owner] if name in children]:
            children[name] = children.pop(name)


def set_layer(owner: nn.Module, name: str, layer: nn.Module | None) -> None:
    """Set a child of `owner`, in place of a plain attribute of that name."""
    vars(owner).pop(name, None)
    children_of(owner)[name] = layer


def _is_other(path: str, built: Layers, now: Layers) -> bool:
    return now[path] not in (path, built.get(path))


def _other_order(built: Layers, now: Layers) -> dict[str, list[str]]:
    """Return, by module, the names of its children where they are not in the order as built, with new ones last."""
    expected = {owner: [name for name in names if _path(owner, name) in now] for owner, names in _names(built).items()}
    for path in now:
        if path not in built and now[path] == path:
            expected.setdefault(owner_of(path), []).append(path.rpartition(".")[2])
    return {owner: names for owner, names in _names(now).items() if names != expected.get(owner)}


def _names(layers: Layers) -> dict[str, list[str]]:
    """Return, by module, the names of its children, in their order."""
    names: dict[str, list[str]] = {}
    for path in list(layers)[1:]:
        names.setdefault(owner_of(path), []).append(path.rpartition(".")[2])
    return names


def _path(owner: str, name: str) -> str:
    return f"{owner}.{name}" if owner else name


def owner_of(path: str) -> str:
    """Return the path of the layer that holds the child, parameter or buffer at `path`."""
    return path.rpartition(".")[0]
