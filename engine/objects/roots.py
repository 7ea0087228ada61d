"""The roots of a walk over objects: the attributes of a module and its submodules, and their hooks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from midstride.engine.code_origin import is_user_class
from midstride.engine.metrics.torchmetrics_state import is_metric, objects_in
from midstride.engine.objects.attributes import INTERNAL, attributes_of, set_attribute
from midstride.engine.objects.registered_hooks import user_hooks
from midstride.engine.objects.walk import GraphWalk

__all__ = ["Root", "module_anchors", "module_roots"]

#: what the engine sets itself on a module, and torch on a recurrent layer: weak references to its weights
_OURS = frozenset({"_trainer", "device", "_is_replica", "_flat_weight_refs"}) | INTERNAL
#: how the names begin under which torch's fully_shard and checkpoint keep state on modules; each attempt sets it up
_COMPOSABLE = "__composable_api_state_key"
#: classes of tensors whose attributes are walked; other classes manage their attributes themselves
_TENSORS = (Tensor, nn.Parameter, nn.Buffer)
_HOOKS = tuple(name for name in INTERNAL if name.endswith("_hooks"))
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


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
        return f"{self.group}/{self.name}" if self.name else self.group

    def nodes(self, walk: GraphWalk) -> dict[str, Any]:
        """Return the nodes of the attributes: by name, or in the order in which they were set if that is restored."""
        is_ordered = not (self.is_setup or self.is_data or self.owner is None)
        return walk.root_attributes(self.values, self.path, is_small=self.is_data, is_ordered=is_ordered)

    def set(self, name: str, value: Any) -> None:
        """Set an attribute of the owner, past any `__setattr__`; without an owner, do nothing."""
        if self.owner is not None:
            set_attribute(self.owner, name, value)


def module_roots(module: nn.Module) -> Iterator[Root]:
    """Yield the attributes of `module` and its submodules, and the hooks that user code registered on them."""
    for path, submodule in module.named_modules():
        if is_metric(submodule):  # what else it holds is in a part of its own
            yield Root("metrics", path, objects_in(submodule), submodule, is_setup=True)
            continue
        ours = _OURS | getattr(type(submodule), "not_state", frozenset())
        found = attributes_of(submodule).items()
        own = {name: value for name, value in found if name not in ours and not name.startswith(_COMPOSABLE)}
        yield Root("module", path, own, submodule, is_setup=not is_user_class(type(submodule)))
        if hooks := user_hooks(submodule, _HOOKS):
            yield Root("hooks", path, hooks)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if hooks := user_hooks(tensor, _TENSOR_HOOKS):
            yield Root("hooks", f"tensor {name}", hooks)
        if type(tensor) in _TENSORS:
            set_on = {key: value for key, value in vars(tensor).items() if not key.startswith("_")}
            yield Root("tensors", name, set_on, tensor, is_setup=True)


def module_anchors(module: nn.Module) -> dict[str, object]:
    """Return the submodules and tensors of `module` that are in other parts of the state, by name."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    modules = {f"module {path}": submodule for path, submodule in module.named_modules()}
    return {**{f"tensor {name}": tensor for name, tensor in tensors.items()}, **modules}
