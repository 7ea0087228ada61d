"""Side effects of reading on data sets and collate_fns, absent in new workers."""

import copy
from collections import deque
from types import SimpleNamespace
from typing import Any

from torch import nn

from midstride.engine.code_origin import is_user_class, is_user_module
from midstride.engine.data.data_owners import DataOwners, Nodes, data_owners
from midstride.engine.objects.digest import digest_lines
from midstride.engine.objects.generator_search import find_generators, restorable
from midstride.engine.objects.kinds.functions import Cached
from midstride.engine.objects.kinds.generators import Generator, get_state, set_state
from midstride.engine.objects.left_out import is_shared
from midstride.engine.objects.roots import class_and_global_state, is_counted_in
from midstride.engine.state.differences import differences, first_difference, same_key_order
from midstride.engine.state.object_nodes import Instance

__all__ = ["ReadSideEffects"]

#: modules of classes that users keep values in
_CONTAINERS = ("types", "argparse", "collections", "queue", "threading", "torch.utils.data.dataset")


class ReadSideEffects(DataOwners):
    """Finds changes of a data set and its collate_fn by reading, in the process that reads.

    Args:
        dataset: the user's data set.
        collate: the user's collate_fn.
        module: module that they may refer to, which is not part of them.
    """

    def __init__(self, dataset: Any, collate: Any, module: nn.Module | None = None) -> None:
        owners = {**dict(data_owners("data set", dataset)), "loader": SimpleNamespace(collate_fn=collate)}
        super().__init__(owners, module)
        self.dataset = dataset
        self._code = [kind for kind in (type(dataset), type(collate)) if is_user_class(kind)]
        self._initial: Nodes | None = None
        self._hooks: list[Any] = []  #: objects with a method `reseed`, called before each sample
        self._hook_states: list[Any] = []  #: their states before the first batch
        self._code_before: dict[str, str] = {}  #: digests of class attributes and globals
        self._last: Nodes | None = None  #: at the batch checked before
        self._batches, self._is_shared, self._has_warned = 0, False, False

    def begin(self) -> None:
        """Record the values before the first batch."""
        if self._initial is None:
            collate = self._given["loader"].collate_fn
            found = [*find_generators(self.dataset).values(), *find_generators(collate).values()]
            self._hooks = restorable([one for one in found if not isinstance(one, Generator)])
            self._hook_states = [*map(get_state, self._hooks)]
            self._initial = copy.deepcopy(self.nodes())
            self._is_shared = any(map(is_shared, self._objects()))
            self._code_before = self._code_lines()

    def nodes(self) -> Nodes:
        """Return the nodes; objects with `reseed` have their states before the first batch."""
        for hook, state in zip(self._hooks, self._hook_states, strict=True):
            set_state(hook, state)
        return super().nodes()

    def is_due(self) -> bool:
        """Return whether to check after this batch: after batches 1, 2, 4, 8 and so on."""
        self._batches += 1
        return self._batches.bit_count() == 1 and self._initial is not None and not self._is_shared

    def changed(self) -> str | None:
        """Return text on a change since before the first batch, with both values, or None."""
        return self.changed_since(self._initial or {})

    def changed_since(self, before: Nodes) -> str | None:
        """Return text on a change since `before`, or None."""
        now = self.nodes()
        if (what := first_difference(before, now)) is not None:
            return what
        return None if same_key_order(before, now) else "the order of a dict"

    def changing_value(self) -> str | None:
        """Return, once, text on a value that has changed since the last check.

        New values and results of cached functions are caches. Objects of libraries keep what they draw for a sample.
        """
        if self._has_warned:
            return None
        last, self._last = self._last, _of_users(copy.deepcopy(self.nodes()))
        lines = [line for line in differences(last, self._last) if "missing" not in line] if last is not None else []
        lines += differences(self._code_before, self._code_lines())
        self._has_warned = bool(lines)
        return lines[0] if lines else None

    def _code_lines(self) -> dict[str, str]:
        found = class_and_global_state((), self._code)
        named = ((name, value) for name, value in found if is_counted_in(value) and not isinstance(value, Cached))
        return {where: line for name, value in named for where, line in digest_lines(name, value).items()}

    def reset(self) -> None:
        """Restore the values before the first batch."""
        self.restore(self._initial or {})

    def _objects(self) -> list[object]:
        walk = self._walk()
        self._nodes(walk)
        return [value for _, value in walk.seen.values()]


def _of_users(node: Any) -> Any:
    """Return `node` without objects of libraries and states of generators."""
    if isinstance(node, Instance):
        module = node.kind.partition(":")[0]
        is_library = node.form == "object" and not (is_user_module(module) or module in _CONTAINERS)
        return Instance(node.form, node.kind, {} if is_library or node.form == "generator" else _of_users(node.state))
    if isinstance(node, dict):
        return {key: _of_users(value) for key, value in node.items()}
    return [*map(_of_users, node)] if isinstance(node, (list, tuple, deque)) else node
