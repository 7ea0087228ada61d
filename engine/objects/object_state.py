"""State of a run besides weights: attributes of modules, callbacks, data, optimizers."""

import copy
import logging
import types
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from midstride.engine.code_origin import is_user_class
from midstride.engine.formatting import format_names
from midstride.engine.objects.attributes import delete_attribute, keep_order
from midstride.engine.objects.changes import Built, CodeChange
from midstride.engine.objects.classes import set_class
from midstride.engine.objects.kinds.kind import MISSING
from midstride.engine.objects.kinds.opaque import WATCHED
from midstride.engine.objects.kinds.plain import PLAIN
from midstride.engine.objects.kinds.table import kind_of
from midstride.engine.objects.made_by_reading import MadeByReading, unwritable_in
from midstride.engine.objects.restore import GraphRestore
from midstride.engine.objects.roots import EveryOwner, QuietOwners, Root, module_anchors, module_hooks, module_roots
from midstride.engine.objects.walk import AsBuilt, GraphWalk
from midstride.engine.objects.watch import NoUnwritableWarnings, RegisteredHooks, UnwritableWarnings, shown
from midstride.engine.seeds import Generators
from midstride.engine.state.differences import differences, same_key_order
from midstride.engine.state.module_index import Members, ModuleIndex
from midstride.engine.state.object_nodes import Same, kind_name
from midstride.engine.state.stateful import AlikeOnRanks, Stateful, state_of

__all__ = ["Objects", "side_effects_reverted"]

log = logging.getLogger(__name__)

#: how to train with settings that the snapshot overrides
_TAKE = ". To train with the new values: --accept-change settings (accept_change='settings' in a script)"
#: beginning of the paths of attributes of data
_DATA = "data/"
Nodes = dict[str, dict[str, dict[str, Any]]]


class Objects(AlikeOnRanks):
    """The attributes of a run's objects, as one part of its state.

    Args:
        module: the module that is trained.
        roots: yields the current attributes, given the module's members, without those of the given owners.
        anchors: returns the objects in other parts of the state, by name, given the module's members.
        device: where tensors are put that training has added.
        is_kept: whether snapshots hold this state; then it warns of values that snapshots cannot hold.
        takes_settings: whether settings that the first attempt built otherwise are taken from this one.
    """

    description = "what an attribute holds"

    def __init__(
        self,
        module: nn.Module,
        roots: Callable[[Members, QuietOwners | None], Iterator[Root]],
        anchors: Callable[[Members], dict[str, object]],
        device: torch.device,
        *,
        is_kept: bool = True,
        takes_settings: bool = False,
    ) -> None:
        self._module, self._index = module, ModuleIndex.of(module)  # the index alone would not keep it alive
        self._roots, self._anchors, self._device = roots, anchors, device
        self._takes_settings, self._is_kept = takes_settings, is_kept
        self._quiet = QuietOwners()
        #: nodes of the values that each attempt sets up, by path, as of the start of the fit
        self._setup: dict[str, Any] = {}
        self._built: dict[str, set[str]] = {}  #: names of all attributes then, by path of their owner
        self._made_by_reading = MadeByReading()
        #: nodes of the data before and after they are read, until flags in them are known
        self._reads: tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]] = {}, {}
        self._as_built = AsBuilt()
        #: objects in those of libraries that no file can hold, by id, each with a name of its own
        self._held: dict[int, tuple[object, str]] = {}
        self._classes: dict[str, str] = {}  #: names of the owners' classes then, by path
        self._code = Built()
        #: path -> text of the setting in force, and of the one that this attempt has built and that has no effect
        self.without_effect: dict[str, tuple[str, str]] = {}
        self._unwritable = UnwritableWarnings() if is_kept else NoUnwritableWarnings()
        #: what is in no snapshot and is watched, by path, as of the last walk: large data, data sets of libraries, and
        #: other objects of theirs that show what they hold
        self.watched: dict[str, object] = {}
        #: classes of the user's that were met then
        self.kinds: set[type] = set()
        self.code: list[object] = []  #: these classes, and functions of the user's that were met then
        self._begin()

    @classmethod
    def of_module(cls, module: nn.Module) -> "Objects":
        """Return the state of one module's objects, without warnings, outside of snapshots."""
        return cls(module, module_roots, module_anchors, torch.device("cpu"), is_kept=False)

    def _begin(self) -> None:
        """Record the state when a fit begins, which every attempt sets up in the same way."""
        walk, roots = self._walk()
        for root in roots:
            nodes = root.nodes(walk)
            self._built[root.path] = set(root.values)
            self._classes[root.path] = kind_name(type(root.owner))
            if is_user_class(type(root.owner)) or not (root.is_setup or root.is_data):
                self._code.add(nodes, root.path, is_setup=root.is_setup or not self._is_kept)
            if root.is_setup or root.is_data:
                self._setup |= {f"{root.path}/{name}": _copied(node) for name, node in nodes.items()}
            if root.is_setup and all(self._as_set_up(f"{root.path}/{name}", node) for name, node in nodes.items()):
                self._quiet.add(root)
        self._as_built.begin()
        self._made_by_reading.begin(walk, self._setup)
        self._unwritable.begin(walk)
        self._note(walk)
        #: functions of the user's that were met when training began
        self.built_functions: list[object] = [one for one in self.code if isinstance(one, types.FunctionType)]
        self._hooks = RegisteredHooks(_hooks_of(roots, walk))

    def _walk(self, quiet: QuietOwners | None = None, members: Members | None = None) -> tuple[GraphWalk, list[Root]]:
        members = members or self._index.now()
        anchors = self._anchors(members)
        tensors = {name: value for name, value in anchors.items() if isinstance(value, Tensor)}
        names = {id(value): name for name, value in anchors.items()}
        walk = GraphWalk(names, tensors, built=self._as_built)
        return walk, [self._without_hook_marks(root) for root in self._roots(members, quiet)]

    def _without_hook_marks(self, root: Root) -> Root:
        """Return `root` without a library's notes that it has registered hooks in training.

        No snapshot holds these hooks: a resumed attempt registers them again, as long as it has no such note.
        """
        built = self._built.get(root.path)
        if built is None or root.group != "module" or not root.is_setup:
            return root
        marks = {name for name in root.values.keys() - built if "hook" in name and root.values[name] is True}
        return replace(root, values={k: v for k, v in root.values.items() if k not in marks}) if marks else root

    def state_dict(self) -> dict[str, Any]:
        """Return every attribute that decides the rest of the run, by group, owner and name."""
        walk, roots = self._walk(self._quiet)
        state: Nodes = {}
        deleted: list[list[str]] = []
        classes = {}
        for root in roots:
            if is_other := (kind := kind_name(type(root.owner))) != self._classes.get(root.path, kind):
                classes[root.path] = kind
            nodes = root.nodes(walk)
            if root.is_data:
                data = root.by_path(nodes)
                self._made_by_reading.note_late(walk, data)
                nodes = root.by_name(self._made_by_reading.without(data))
            if root.is_setup or root.is_data:
                nodes = {name: node for name, node in nodes.items() if not self._as_set_up(f"{root.path}/{name}", node)}
            if nodes:
                state.setdefault(root.group, {})[root.name] = nodes
            gone = self._built.get(root.path, set()) - set(root.values)
            deleted += [[root.path, name] for name in sorted(gone)]
            if not (is_other or nodes or gone):
                self._quiet.add(root)
        self._unwritable.ignore(self._made_by_reading.paths)
        self._unwritable.warn(walk)
        self._unwritable.warn_of_replaced(walk, [root.path for root in roots])
        self._hooks.compare(_hooks_of(roots, walk))
        self._note(walk)
        others = {"deleted": deleted, "classes": classes}
        return {**state, **{name: value for name, value in others.items() if value}, "built": self._code.state()}

    def places(self) -> dict[int, str]:
        """Return the places in a snapshot of all objects that a restore fills, by their addresses.

        An object moved to another place, or resized, has another text: a restore fills another object there.
        """
        walk, roots = self._walk(self._quiet)  # quiet owners are anchors, and hold plain values only
        for root in roots:
            root.nodes(walk)
        left_out = (walk.opaque, walk.held, walk.large, walk.deep, walk.compared)
        not_filled = {id(one) for found in left_out for one in found.values()}
        owners = {id(root.owner): root.path for root in roots if root.owner is not None}
        kinds = {kind: kind_of(kind) for kind in {type(one) for _, one in walk.seen.values()}}
        seen = {
            address: f"{path}{_layout(one)}"
            for address, (path, one) in walk.seen.items()
            if address not in not_filled and kinds[type(one)].fills(one)
        }
        return {**owners, **walk.anchors, **seen}

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Record objects that reading makes and no file can hold, such as open files.

        They are neither state nor named: a resumed run reads data, too.
        """
        walk, data = self._walk_data()
        lost, before = unwritable_in(walk).keys(), copy.deepcopy(data)
        yield
        walk, data = self._walk_data()
        for owner, nodes in data.items():
            made = {path for path in unwritable_in(walk) if path not in lost and path.startswith(f"{owner}/")}
            self._made_by_reading.note(made, nodes)
        self._unwritable.ignore(self._made_by_reading.paths)
        self.watched = self.watched | _watched(walk)
        self._reads = before, data

    def leave_out_flags(self, written: Collection[str]) -> None:
        """Leave out flags that `reading` has set beside what it has made.

        Other values that it has changed beside filled arrays are named.

        Args:
            written: names of watched values that reading has changed.
        """
        (before, data), self._reads = self._reads, ({}, {})
        made = self._made_by_reading.paths
        changed = [path for path in self.watched if path.replace("/", ".") in written and path not in made]
        for owner, nodes in data.items():
            filled = [path for path in changed if path.startswith(f"{owner}/")]
            if not filled and not self._made_by_reading.is_in(owner):
                continue
            self._made_by_reading.note_flags(before.get(owner, {}), nodes)
            filled = [path for path in filled if isinstance(self.watched[path], (Tensor, np.ndarray))]  # no mere caches
            others = self._made_by_reading.state_changed(before.get(owner, {}), nodes) if filled else []
            if others:
                log.warning(
                    "reading the data changes %s, which no snapshot holds, and %s, which a resumed run restores. If "
                    "the one tells what the other holds, samples of a resumed run differ. Fill it in __init__, or set "
                    "num_workers=1: a worker begins with both as built",
                    format_names([shown(path) for path in filled]),
                    format_names([shown(path) for path in others]),
                )

    def _walk_data(self) -> tuple[GraphWalk, dict[str, dict[str, Any]]]:
        """Return a walk of the data, and the nodes of their attributes, by owner and by path."""
        walk, roots = self._walk(EveryOwner())
        return walk, {root.path: root.by_path(root.nodes(walk)) for root in roots if root.is_data}

    def _note(self, walk: GraphWalk) -> None:
        """Record what `walk` has met and no snapshot holds."""
        for value in walk.held.values():
            self._held.setdefault(id(value), (value, f"{kind_name(type(value))} {len(self._held) + 1}"))
        held = {path: self._held[id(value)][1] for path, value in walk.held.items()}
        self.watched, self.kinds = _watched(walk) | held, _kinds(walk)
        self.code = [*self.kinds, *(one for _, one in walk.seen.values() if type(one) is types.FunctionType)]

    def _as_set_up(self, path: str, node: Any) -> bool:
        before = self._setup.get(path, MISSING)
        if type(before) is not type(node) or (type(node) is Same and node.path.startswith(_DATA)):
            return False  # what it is the same as may be another object when a state is back
        if type(node) in PLAIN:
            return bool(before == node)
        return not differences(before, node) and same_key_order(before, node)

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore every attribute, in place wherever a live object can take the values."""
        change = CodeChange(self._code, Built.read(state_dict.pop("built", {})), self._takes_settings)
        others = {f"{group}/{name}".rstrip("/") for group, owners in state_dict.items() for name in owners}
        others |= {path for path, _ in state_dict.get("deleted", ())} | {*state_dict.get("classes", ())}
        quiet = self._quiet.without(others)
        members = self._index.now()  # which stay the same: classes and attributes change
        lost = self._set_classes(state_dict.get("classes", {}), [*self._roots(members, quiet)])
        walk, roots = self._walk(quiet, members)
        for root in roots:
            self._leave_setup_out(root, state_dict)
        saved = [self._saved(root, state_dict, walk) for root in roots]
        restore = GraphRestore(walk, self._anchors(members), self._device, change)
        restore.stale.update(lost)
        left = {
            f"{root.path}/{name}"
            for root, nodes in zip(roots, saved, strict=True)
            for name in root.values
            if name not in nodes
        }
        restore.hold(left & self._setup.keys())  # what is as set up keeps its own objects
        for root, nodes in zip(roots, saved, strict=True):
            if root.group == "hooks" and root.values.keys() - nodes.keys():
                # Training has removed some: the state of one must not go to another of the same number.
                restore.mark_stale(root.path, "fewer hooks", list(root.values))
                continue
            self._fill(root, nodes, restore)
            if root.owner is not None:
                self._delete_attributes(root, nodes, state_dict.get("deleted", []), change)
            if root.is_ordered:
                keep_order(root.owner, nodes)
        paths = {root.path for root in roots}
        groups = state_dict.keys() - {"deleted", "classes"}
        for path in [f"{group}/{name}" for group in groups for name in state_dict[group]]:
            if path.rstrip("/") not in paths:
                change.lose(path)
        self._code = change.after({root.path: nodes for root, nodes in zip(roots, saved, strict=True)})
        self.without_effect = {shown(path): texts for path, texts in change.without_effect.items()}
        self._report(restore)
        is_other = restore.is_changed or change.found or restore.stale or restore.reordered
        now = self.state_dict() if is_other else {**state_dict, "built": self._code.state()}
        state_dict.clear()
        state_dict.update(now)  # what is read back: with what could not be as it was, which has been said

    def _set_classes(self, classes: Mapping[str, str], roots: Sequence[Root]) -> dict[str, str]:
        """Set owners' classes as in the snapshot, or as built; return those that could not be set.

        Args:
            classes: those that the snapshot names, by path.
            roots: the owners, without those that have the classes that they were built with.
        """
        lost = {}
        for root in roots:
            now = kind_name(type(root.owner))
            wanted = classes.get(root.path, self._classes.get(root.path, now))
            if now == wanted:
                continue
            if not set_class(root.owner, wanted):
                lost[f"{root.path}/__class__"] = f"{wanted}, now {now}"
        return lost

    def _fill(self, root: Root, nodes: dict[str, Any], restore: GraphRestore) -> None:
        for name, node in nodes.items():
            path = f"{root.path}/{name}"
            if restore.change.drops(root.path, name):
                restore.skip(node, path)
                continue
            before = root.values.get(name, MISSING)
            if root.is_setup and root.owner is not None and restore.keep_whole(node, before, path):
                continue
            after = restore.value(node, before, path)
            if after is before or after is MISSING:
                continue
            if root.owner is None and root.is_data:  # what reads them has the live one
                restore.mark_stale(path, "another object", before)
            root.set(name, after)

    def _leave_setup_out(self, root: Root, state: dict[str, Any]) -> None:
        """Remove from `state` the values that this attempt sets up itself, as `state_dict` does."""
        group = state.get(root.group, {})
        nodes = group.get(root.name, {})
        for name in [name for name, node in nodes.items() if self._as_set_up(f"{root.path}/{name}", node)]:
            del nodes[name]
        if root.name in group and not nodes:
            del group[root.name]
        if root.group in state and not group:
            del state[root.group]

    def _saved(self, root: Root, state: dict[str, Any], walk: GraphWalk) -> dict[str, Any]:
        """Return the nodes to restore in `root`: those of the snapshot, or else those of the setup."""
        nodes = root.nodes(walk)
        setup = {
            name: _copied(self._setup[f"{root.path}/{name}"])
            for name, node in nodes.items()
            if f"{root.path}/{name}" in self._setup and not self._as_set_up(f"{root.path}/{name}", node)
        }
        saved: dict[str, Any] = state.get(root.group, {}).get(root.name, {})
        if isinstance(saved, OrderedDict):
            return saved
        saved = {**setup, **saved}
        if root.is_data:
            saved = root.by_name(self._made_by_reading.kept(root.by_path(saved), root.by_path(nodes)))
        # In the order of a walk: what is met again comes after what it is the same as.
        return dict(sorted(saved.items()))

    def _delete_attributes(
        self, root: Root, saved: dict[str, Any], deleted: list[list[str]], change: CodeChange
    ) -> None:
        """Delete attributes set after the snapshot was taken, and those that were deleted before."""
        built = self._built.get(root.path, set())
        for name in root.values.keys() - saved.keys():
            if name not in built or [root.path, name] in deleted:
                delete_attribute(root.owner, name)
            else:
                change.adds(root.path, name)
        for path, name in deleted:
            if path == root.path:
                change.drops(path, name)  # which notes it, if the code has removed it, too

    def _report(self, restore: GraphRestore) -> None:
        if restore.change.found:
            lines = [f"{what}: {format_names(names)}" for what, names in restore.change.found.items()]
            log.warning(
                "the code builds other objects than those in the snapshot: %s%s",
                "; ".join(lines),
                _TAKE if restore.change.without_effect else "",
            )
        if restore.stale:
            lines = [f"{shown(path)} (was {what})" for path, what in restore.stale.items()]
            log.warning(
                "these values cannot be restored from the snapshot, and keep those of this attempt's code: %s. "
                "Build it in __init__ or setup, or in on_load_checkpoint",
                format_names(lines),
            )
        if restore.reordered:
            log.warning(
                "these sets iterate in another order than when the snapshot was taken: %s. Where order matters, use "
                "dict.fromkeys(...) or sorted(...)",
                format_names([shown(path) for path in restore.reordered]),
            )


def _hooks_of(roots: Sequence[Root], walk: GraphWalk) -> dict[str, Mapping[str, Any]]:
    """Return the user's hooks by their owners, also those on modules that attributes hold."""
    held: list[tuple[str, Any]] = [
        (path, value) for path, value in walk.seen.values() if issubclass(type(value), nn.Module)
    ]
    return {root.path: root.values for root in roots if root.group == "hooks"} | {
        f"hooks/{shown(path)}": hooks for path, value in held if (hooks := module_hooks(value))
    }


def _watched(walk: GraphWalk) -> dict[str, object]:
    data = {path: value for path, value in walk.opaque.items() if issubclass(type(value), WATCHED)}
    large = {path: value for path, value in walk.large.items() if not _is_read_only_file(value)}
    return large | data | walk.compared


def _is_read_only_file(value: object) -> bool:
    return isinstance(value, np.memmap) and not value.flags.writeable


def _layout(value: object) -> str:
    return f" {[*value.shape]} {value.dtype}" if isinstance(value, (Tensor, np.ndarray)) else ""


def _kinds(walk: GraphWalk) -> set[type]:
    """Return the user's classes that a walk met, and those of the objects that it met."""
    met = [value for _, value in walk.seen.values()]
    kinds: set[Any] = {*map(type, met), *(value for value in met if issubclass(type(value), type))}
    return {kind for kind in kinds if is_user_class(kind)}


def _copied(node: Any) -> Any:
    return node if type(node) in PLAIN else copy.deepcopy(node)


@contextmanager
def side_effects_reverted(module: nn.Module, generators: Generators, objects: Objects | None = None) -> Iterator[None]:
    """Revert changes by steps of `module` in the block: buffers, objects, generators.

    Args:
        module: the module that is called.
        generators: generators of the devices on which the step draws.
        objects: objects that may change, those of the module included; None for those of the module only.
    """
    parts: dict[str, Stateful] = {"objects": objects or Objects.of_module(module), "generators": generators}
    before = copy.deepcopy(state_of(parts))
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    try:
        yield
    finally:
        for name, part in parts.items():
            part.load_state_dict(before[name])
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                if name in buffers:
                    buffer.copy_(buffers[name])
