"""Tables of pandas, in the parts that pickle would take them apart into."""

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from midstride.engine.code_origin import module_of
from midstride.engine.objects.kinds.kind import MISSING, Kind
from midstride.engine.objects.kinds.opaque import OPAQUE
from midstride.engine.objects.kinds.plain import PLAIN, VALUES
from midstride.engine.state.object_nodes import Instance, kind_name, step

if TYPE_CHECKING:
    from midstride.engine.objects.restore import GraphRestore
    from midstride.engine.objects.walk import GraphWalk

__all__ = ["Tables"]

#: modules of pandas, and those inside of them, whose objects are tables, columns, indices, values and their types
_MODULES = (
    *("pandas", "pandas.arrays", "pandas.core.arrays", "pandas.core.indexes", "pandas.core.internals"),
    *("pandas.core.frame", "pandas.core.series", "pandas.core.dtypes.dtypes", "pandas._libs.sparse"),
    "pandas._libs.tslibs",
)
_INSIDE = tuple(f"{module}." for module in _MODULES[1:])
#: functions that make one of a class, which is their first argument; a snapshot cannot name others
_MAKERS = (
    *("copyreg:__newobj__", "pandas.core.indexes.base:_new_Index", "pandas._libs.arrays:__pyx_unpickle_NDArrayBacked"),
    *("pandas.core.indexes.datetimes:_new_DatetimeIndex", "pandas._libs.interval:__pyx_unpickle_IntervalMixin"),
)
#: functions that make a value of their arguments
_UNPICKLERS = (
    *("pandas._libs.internals:_unpickle_block", "pandas._libs.tslibs.timestamps:_unpickle_timestamp"),
    "pandas._libs.tslibs.timedeltas:_timedelta_unpickle",
)
#: class of a missing value -> its name in pandas
_NO_VALUES = {"NAType": "NA", "NaTType": "NaT"}
#: maker of columns of text, of whatever library they are in
_TEXT = "pandas:array"


class Tables(Kind):
    """Tables, columns and indices of pandas, with their parts."""

    form = "table"

    def matches(self, kind: type) -> bool:
        """Return whether `kind` is one of these classes of pandas."""
        module = module_of(kind)
        is_missing = kind.__name__ in _NO_VALUES and module.startswith("pandas.")
        return module in _MODULES or module.startswith(_INSIDE) or is_missing

    def fills(self, value: Any) -> bool:
        """Return whether `value` is a table or column."""
        return hasattr(value, "iloc")

    def describe(self, walk: "GraphWalk", value: Any, path: str) -> Any:
        """Return the function that would make it again, its arguments and state."""
        if type(value).__name__ in _NO_VALUES:
            return self.instance(value)
        if not _is_kept(value):
            return OPAQUE.describe(walk, value, path)
        walk.meet(value, path)
        maker, arguments, state = _reduced(value)
        with walk.inside(is_library=False):
            nodes = {"args": walk.node(arguments, step(path, "args"))}
            if state is not None:
                nodes["state"] = walk.node(state, step(path, "state"))
        return self.instance(value, maker=maker, **nodes)

    def restore(self, restore: "GraphRestore", node: Instance, live: Any, path: str) -> Any:
        """Set the state of a table in place; build indices and other immutable objects again."""
        if (name := _NO_VALUES.get(node.kind.rpartition(":")[2])) is not None:
            return getattr(sys.modules.get("pandas"), name, MISSING)
        kind, maker = _found(node.kind), _maker(node.state["maker"], node.kind)
        arguments = restore.value(node.state["args"], MISSING, step(path, "args"))
        state = restore.value(node.state.get("state"), MISSING, step(path, "state"))
        if kind is None or maker is None or any(where.startswith(f"{path}/") for where in restore.stale):
            return restore.mark_stale(path, node.kind, live)
        if not restore.claim(live, path, fits=type(live) is kind and self.fills(live)):
            live = maker(kind, *arguments) if node.state["maker"] in _MAKERS else maker(*arguments)
        if state is not None:
            _set_state(live, state)
        return restore.record(live, path)


_TABLES = Tables()


def _reduced(value: Any) -> tuple[str, tuple[Any, ...], Any]:
    """Return name of the maker, arguments and state of an object, as pickle would have them.

    Raises:
        TypeError: pickle would take it apart in another way.
    """
    if "StringArray" in type(value).__name__:
        return _TEXT, (value.to_numpy(object, na_value=None).tolist(), value.dtype), None
    reduced = value.__reduce_ex__(4)
    if isinstance(reduced, str) or any(part is not None for part in reduced[3:]):
        raise TypeError(f"a {type(value)} is pickled as {reduced}")
    function, arguments = reduced[:2]
    maker = kind_name(function)
    if maker in _MAKERS:
        arguments = arguments[1:]
    elif maker not in _UNPICKLERS and function is not type(value):
        raise TypeError(f"{maker} makes a {type(value)}")
    return maker, arguments, reduced[2] if len(reduced) > 2 else None


def _is_kept(value: Any) -> bool:
    """Return whether `value` and all that it consists of can be written."""
    kind: type = type(value)
    if kind in PLAIN or kind in VALUES:
        return True
    if kind in (list, tuple):
        return all(map(_is_kept, value))
    if kind is dict:
        return all(map(_is_kept, value.values()))
    if isinstance(value, np.ndarray):
        return all(map(_is_kept, value.ravel().tolist())) if value.dtype == object else kind is np.ndarray
    if isinstance(value, (np.generic, np.dtype)):
        return True
    if kind.__name__ in _NO_VALUES or not _TABLES.matches(kind):
        return _TABLES.matches(kind)
    try:
        _, arguments, state = _reduced(value)
    except Exception:  # of a library
        return False
    return _is_kept(arguments) and _is_kept(state)


def _found(name: str) -> Any:
    """Return the class of pandas called `name`; None if it is not loaded, or no such class."""
    module, _, path = name.partition(":")
    found = getattr(sys.modules.get(module), path, None)
    return found if isinstance(found, type) and _TABLES.matches(found) else None


def _maker(name: str, kind: str) -> Any:
    module, _, path = name.partition(":")
    return getattr(sys.modules.get(module), path, None) if name in (kind, _TEXT, *_MAKERS, *_UNPICKLERS) else None


def _set_state(made: Any, state: Any) -> None:
    if hasattr(made, "__setstate__"):
        made.__setstate__(state)
    else:
        vars(made).update(state)
