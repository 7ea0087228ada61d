"""Objects of libraries in the parts that pickle writes, such as a tree of scikit-learn."""

import copyreg
import io
import pickle
import re
import types
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from midstride.engine.code_origin import is_user_class, module_of
from midstride.engine.errors import EngineError
from midstride.engine.objects.attributes import made_by, set_attribute
from midstride.engine.objects.classes import BASES, CONTAINERS, is_library, is_of_a_process, sets_state
from midstride.engine.objects.kinds.kind import MISSING, Kind
from midstride.engine.objects.kinds.opaque import OPAQUE
from midstride.engine.objects.left_out import bytes_in
from midstride.engine.state.differences import differences
from midstride.engine.state.object_nodes import Instance, kind_name, loaded, step

if TYPE_CHECKING:
    from midstride.engine.objects.restore import GraphRestore
    from midstride.engine.objects.walk import GraphWalk

__all__ = ["Reduced", "is_reduced"]

#: classes with a `close` that hold nothing open outside of the process
_CLOSED_FREELY = frozenset(
    {*map(kind_name, (io.BytesIO, io.StringIO)), "xarray.core.dataset:Dataset", "xarray.core.dataarray:DataArray"}
)
#: classes that other kinds keep, or that are data
_OTHERS = (type, types.FunctionType, types.ModuleType, nn.Module, Tensor, Dataset, DataLoader, Sampler, tuple, *BASES)
#: functions of libraries that make objects for pickle; a snapshot cannot name others
_MAKER = re.compile("unpickle|reconstruct|rebuild|_ctor|_new_|_make|newObj$|compile$")
_NEW = "copyreg:__newobj__"
#: most objects, and bytes of text and arrays, in one that is kept so; a larger one would be written each time
_MOST_PARTS, _MOST_BYTES = 10_000, 1 << 18
#: class -> whether an object of it was taken apart, made again, and was the same
_proven: dict[type, bool] = {}


class _Parts(NamedTuple):
    """The parts of an object, as pickle would write them."""

    maker: str  #: name of the function or class that makes the object
    takes_class: bool  #: whether the class is its first argument
    args: tuple[Any, ...]  #: its other arguments
    state: Any  #: what the made object is given; None if nothing
    items: list[Any]
    pairs: list[tuple[Any, Any]]


class Reduced(Kind):
    """Objects that pickle takes apart into values that other kinds keep."""

    form = "reduced"
    is_filled = False

    def matches(self, kind: type) -> bool:
        """Return whether `kind` is the user's and derived from one in C that pickle takes apart."""
        return not is_library(kind) and made_by(kind) not in CONTAINERS and _is_reducible(kind)

    def describe(self, walk: "GraphWalk", value: Any, path: str) -> Any:
        """Return the maker and the nodes of its arguments, of state and items."""
        if not is_reduced(walk, value):
            return OPAQUE.describe(walk, value, path)
        try:
            parts = _parts_of(value)
        except Exception:  # it holds what others of its class do not
            return OPAQUE.describe(walk, value, path)
        walk.meet(value, path)
        with walk.inside(is_library=not is_user_class(type(value)), is_quiet=walk.is_quiet):
            nodes = {name: walk.node(part, step(path, name)) for name, part in _held(parts).items()}
        return self.instance(value, maker=parts.maker, takes_class=parts.takes_class, **nodes)

    def restore(self, restore: "GraphRestore", node: Instance, live: Any, path: str) -> Any:
        """Set the state of the live object, or make another."""
        kind = type(live) if kind_name(type(live)) == node.kind else loaded(node.kind)
        if kind is None or not _is_reducible(kind) or not _is_maker(node.state["maker"], kind):
            return restore.mark_stale(path, node.kind, live)
        try:
            return _restored(restore, node, live, kind, path)
        except EngineError:
            raise
        except Exception as error:  # of a library
            return restore.mark_stale(path, f"{node.kind}, which raised {type(error).__name__}", live)


def _restored(restore: "GraphRestore", node: Instance, live: Any, kind: Any, path: str) -> Any:
    before = _held(_parts_of(live)) if type(live) is kind else {}
    if type(live) is kind and not differences(restore.describe(live), node) and restore.claim(live, path, fits=True):
        return live
    saved = {name: part for name, part in node.state.items() if name not in ("maker", "takes_class")}
    is_filled = before.keys() == saved.keys() == {"args", "state"}
    is_filled = is_filled and not differences(restore.describe(before["args"]), saved["args"])
    is_filled = is_filled and restore.claim(live, path, fits=True)
    args = restore.value(saved["args"], before.get("args", MISSING), step(path, "args"))
    target = (
        live if is_filled else restore.record(_made(kind, node.state["maker"], args, node.state["takes_class"]), path)
    )
    rest = {
        name: restore.value(part, before.get(name, MISSING) if is_filled else MISSING, step(path, name))
        for name, part in saved.items()
        if name != "args"
    }
    if any(where.startswith(f"{path}/") for where in restore.stale):
        return restore.mark_stale(path, node.kind, live)
    _fill(target, rest)
    return target


def _held(parts: _Parts) -> dict[str, Any]:
    """Return the parts that are not empty, by name; arguments always."""
    named = {"state": parts.state, "items": parts.items, "pairs": parts.pairs}
    return {"args": parts.args, **{name: part for name, part in named.items() if part is not None and part != []}}


def _parts_of(value: Any) -> _Parts:
    """Return the parts of an object.

    Raises:
        TypeError: pickle takes it apart in another way, or not at all.
    """
    kind: type = type(value)
    function = copyreg.dispatch_table.get(kind)
    reduced: Any = function(value) if function is not None else value.__reduce_ex__(4)
    if isinstance(reduced, str) or len(reduced) > 5:
        raise TypeError(f"a {kind} is pickled as {reduced}")
    parts: list[Any] = [*reduced, None, None, None]
    made_with, args, state, items, pairs = parts[:5]
    maker = kind_name(made_with)
    if not _is_maker(maker, kind):
        raise TypeError(f"{maker} makes a {kind}")
    takes_class = bool(args) and args[0] is kind
    return _Parts(maker, takes_class, tuple(args[takes_class:]), state, [*(items or ())], [*(pairs or ())])


def _is_maker(name: str, kind: type) -> bool:
    """Return whether the function called `name` makes objects of `kind` and does nothing else."""
    module, _, function = name.partition(":")
    if name in (_NEW, kind_name(kind)):
        return True
    owners = {module_of(base).partition(".")[0].lstrip("_") for base in kind.__mro__ if base is not object}
    return module.partition(".")[0].lstrip("_") in owners and _MAKER.search(function) is not None


def _made(kind: Any, maker: str, args: tuple[Any, ...], takes_class: bool) -> Any:
    if maker == _NEW:
        return kind.__new__(kind, *args)
    return loaded(maker)(*([kind] if takes_class else []), *args)


def _fill(made: Any, parts: dict[str, Any]) -> None:
    """Give a made object its state and items, as pickle would."""
    state = parts.get("state")
    if state is not None and hasattr(made, "__setstate__"):
        made.__setstate__(state)
    elif state is not None:
        own, slots = state if isinstance(state, tuple) else (state, None)
        for name, value in {**(own or {}), **(slots or {})}.items():
            set_attribute(made, name, value)
    for item in parts.get("items", ()):
        made.append(item)
    for key, item in parts.get("pairs", ()):
        made[key] = item


def _is_reducible(kind: Any) -> bool:
    """Return whether pickle takes objects of `kind` apart, and they hold nothing open."""
    if not isinstance(kind, type) or issubclass(kind, _OTHERS) or kind_name(kind).startswith("midstride.engine"):
        return False
    is_free = any(kind_name(base) in _CLOSED_FREELY for base in kind.__mro__)
    if not is_free and (is_of_a_process(module_of(kind)) or hasattr(kind, "close") or hasattr(kind, "__del__")):
        return False
    default: Any = object
    names = ("__reduce__", "__reduce_ex__", "__getstate__")
    is_own = any(getattr(kind, name) is not getattr(default, name) for name in names)
    return is_own or is_free or sets_state(kind) or kind in copyreg.dispatch_table


def is_reduced(walk: "GraphWalk", value: Any) -> bool:
    """Return whether `value` is kept by its parts; the first object of a class is tried."""
    kind: type = type(value)
    if kind not in _proven:
        _proven[kind] = True  # for those inside of it
        _proven[kind] = _is_reducible(kind) and _is_made_again(type(walk), value)
    return _proven[kind]


def _is_made_again(walk_of: "type[GraphWalk]", value: Any) -> bool:
    try:
        if bytes_in([*_held(_parts_of(value)).values()], _MOST_BYTES) > _MOST_BYTES:
            return False
        node = (walk := walk_of({}, {})).node(value, "")
        met = [one for _, one in walk.seen.values()]
        if walk.opaque or walk.compared or len(met) > _MOST_PARTS or any(isinstance(one, nn.Module) for one in met):
            return False
        made = pickle.loads(pickle.dumps(value))
        return type(made) is type(value) and not differences(node, walk_of({}, {}).node(made, ""))
    except Exception:  # of a library
        return False
