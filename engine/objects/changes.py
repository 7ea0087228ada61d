"""Differences between the objects that this attempt's code builds and those that the snapshot's code built."""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from midstride.engine.objects.kinds.plain import PLAIN
from midstride.engine.state.object_nodes import Instance, key_path, step, value_path

__all__ = ["Built", "CodeChange", "built_by"]

#: path of an object -> its attributes, each with its plain value or its kind
Built = dict[str, dict[str, str]]
_CODE = ("function", "method")


def built_by(nodes: Mapping[str, Any], path: str) -> Built:
    """Return the attributes at `path`, described by `nodes`, and those of the objects in them, as they are built."""
    built = {path: {name: _brief(node) for name, node in nodes.items()}}
    for name, node in nodes.items():
        built.update(_inside(node, step(path, name)))
    return built


def _inside(node: Any, path: str) -> Iterator[tuple[str, dict[str, str]]]:
    if isinstance(node, Instance) and node.form == "object":
        yield from built_by(node.state["attributes"], path).items()
    else:
        for child, where in _items(node, path):
            yield from _inside(child, where)


def _items(node: Any, path: str) -> Iterator[tuple[Any, str]]:
    """Yield the nodes of the items of a container's node, each with its path."""
    if isinstance(node, Instance) and "keys" in node.state:
        for index, (key, value) in enumerate(zip(node.state["keys"], node.state["values"], strict=True)):
            yield from ((key, key_path(path, index)), (value, value_path(path, index)))
        return
    if isinstance(node, Instance):
        node = node.state.get("members")
    if isinstance(node, dict):
        yield from ((child, step(path, key)) for key, child in node.items())
    elif isinstance(node, (list, tuple, deque)) and not PLAIN.issuperset(map(type, node)):
        yield from ((child, f"{path}/{index}") for index, child in enumerate(node))


def _brief(node: Any) -> str:
    if isinstance(node, Instance):
        return node.kind
    return repr(node)[:100] if type(node) in PLAIN else type(node).__name__


@dataclass
class CodeChange:
    """What differs between the code that builds this attempt and the code that built the attempt of the snapshot.

    Args:
        now: attributes that this attempt built.
        then: attributes that the snapshot's attempt built; empty if the snapshot did not record them.
    """

    now: Built = field(default_factory=dict)
    then: Built = field(default_factory=dict)
    #: attributes with a difference, as paths, by the words that tell what becomes of them
    found: dict[str, list[str]] = field(default_factory=dict)

    def adds(self, path: str, name: str) -> bool:
        """Return whether an attribute that the snapshot lacks is new in the code."""
        is_new = bool(self.then) and name in self.now.get(path, {}) and name not in self.then.get(path, {})
        return is_new and self._note("new, and as built", step(path, name) if path in self.then else path)

    def drops(self, path: str, name: str) -> bool:
        """Return whether an attribute that the snapshot holds was removed from the code."""
        is_gone = path in self.now and name not in self.now[path] and name in self.then.get(path, {})
        return is_gone and self._note("gone, and dropped", step(path, name))

    def replaces(self, path: str, name: str, saved: Any) -> bool:
        """Return whether the value that the code builds now replaces an attribute that training did not change.

        A function is replaced, because it is code. Another value may come from a clock or a random number: that of the
        snapshot is kept, and the difference is recorded in `found`.
        """
        then, now = self.then.get(path, {}).get(name), self.now.get(path, {}).get(name)
        if then is None or now is None or now == then or _brief(saved) != then:
            return False
        if isinstance(saved, Instance) and saved.form in _CODE:
            return self._note("built otherwise, and the new one holds", f"{step(path, name)} ({then}, now {now})")
        if type(saved) in PLAIN:
            self._note("built otherwise, and the snapshot's holds", f"{step(path, name)} ({then}, now {now})")
        return False

    def lose(self, path: str) -> None:
        """Record in `found` that an object whose attributes the snapshot holds does not exist any more."""
        self._note("gone, and dropped", path)

    def _note(self, what: str, which: str) -> bool:
        """Record the attribute `which` under `what` in `found`; return True."""
        lines = self.found.setdefault(what, [])
        if which not in lines:
            lines.append(which)
        return True

    def after(self, saved: Mapping[str, Any]) -> Built:
        """Return what counts as built from now on; `saved` are the attributes of the snapshot by path.

        Attributes that training set are left out, even if this attempt builds them, from an object trained before.
        """
        late = {
            (path, name) for path, names in saved.items() for name in names if name not in self.then.get(path, {name})
        }
        return {
            path: {name: brief for name, brief in built.items() if (path, name) not in late}
            for path, built in self.now.items()
        }
