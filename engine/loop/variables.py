"""Names the variables of a script that change in training and that no snapshot holds."""

import itertools
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import BuiltinMethodType, FrameType, FunctionType, GeneratorType, MethodType
from typing import Any

from torch import nn
from torch.utils.data import DataLoader
from xxhash import xxh3_64_hexdigest

from midstride.engine.checkpointing.unsaved_state import is_checked_at
from midstride.engine.code_origin import is_user_class, is_user_file
from midstride.engine.data.torch_internals import batches_read, is_loader_pass
from midstride.engine.formatting import format_names
from midstride.engine.loop.feeds import LoopLoader
from midstride.engine.loop.frames import reads_loop, script_frames
from midstride.engine.loop.kept import unwrapped
from midstride.engine.loop.liveness import loop_variables
from midstride.engine.loop.state import LoopObjects, outer_values
from midstride.engine.objects.attributes import attributes_of, items_of
from midstride.engine.objects.constants import is_of_clock
from midstride.engine.objects.digest import digest_lines
from midstride.engine.objects.kinds.generators import Generator
from midstride.engine.objects.kinds.plain import PLAIN
from midstride.engine.objects.object_state import Objects
from midstride.engine.objects.roots import function_values, is_code, is_counted_in, module_anchors
from midstride.engine.objects.user_modules import functions_of, global_reads
from midstride.engine.state.module_index import ModuleIndex
from midstride.engine.state.stateful import Stateful
from midstride.engine.state.tensor_digest import tensor_digest

__all__ = ["ScriptVariables", "VariableWatch", "code_in_loop", "outside_of_frames"]

log = logging.getLogger(__name__)

_CO_GENERATOR = 0x20
#: packages of ours that iterate over a loop for the user
_DRIVERS = (str(Path(__file__).parents[1] / "huggingface") + os.sep,)
#: boundaries of a pass, or ends of epochs, at which variables are compared with the first one
_LOOKS = 3
#: of each tensor of a module that is not kept: an optimizer changes all of its elements
_SAMPLE_BYTES = 64
#: what holds values in its closure or arguments, and items of a container in which these are looked for
_CALLED, _MOST_ITEMS = (FunctionType, partial), 100


class ScriptVariables:
    """Digests of the variables that an iteration of a script leaves to the next.

    As a part of the state it restores none: where a pass goes on, it names those that have other values now.

    Args:
        objects: objects of the loop, which snapshots hold.
        speaks: whether this rank warns.
    """

    def __init__(self, objects: LoopObjects, *, speaks: bool) -> None:
        self._objects, self.speaks = objects, speaks
        self._saved: dict[str, str] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the variables; those of a snapshot until they were compared."""
        return self.now() if self._saved is None else dict(self._saved)

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Take the variables of a snapshot, to compare them."""
        self._saved = dict(state_dict)

    def compare(self) -> None:
        """Warn of variables that differ from the snapshot, where the script continues from it."""
        saved, self._saved = self._saved, None
        if not saved:
            return
        now = self.with_objects()
        if self.speaks and (other := [name for name in saved if name in now and now[name][0] != saved[name]]):
            log.warning(
                "resumed with other values than at the snapshot: %s. If they decide what is trained or logged, %s",
                format_names([f"{name} (was {saved[name]}, is {now[name][0]})" for name in other], 3),
                _way_to_keep(other[0], now[other[0]][1]),
            )

    def forget(self) -> None:
        """Compare no more with the snapshot: the script has ended its epoch."""
        self._saved = None

    def now(self) -> dict[str, str]:
        """Return the variables of the iterating function and of generators within it."""
        return {name: digest for name, (digest, _) in self.with_objects().items()}

    def with_objects(self) -> dict[str, tuple[str, object]]:
        """Return each of them with the object of its variable."""
        kept, known = self._kept_ids(), cache(self._known)
        in_state = {id(one) for one in vars(self._objects.state).values() if type(one) not in PLAIN}
        found: dict[str, tuple[str, object]] = {}
        for frame in iterating_frames():
            variables = dict(frame.f_locals)  # from Python 3.13 on a proxy, whose keys are a list
            of_loop = loop_variables(frame.f_code, frame.f_lasti)
            own = (of_loop.carried | of_loop.assigned) & {*frame.f_code.co_cellvars}
            for name in sorted(of_loop.carried & variables.keys()):
                if id(variable := variables[name]) in in_state:
                    found[f"{name} in {_place(frame)}"] = "part of loop.state", variable
                    continue
                for path, value in _values(name, variable, kept, own):
                    if is_watched(value, kept):
                        found[f"{path} in {_place(frame)}"] = _digest(value, known), variable
        return found

    def are_read_after(self) -> bool:
        """Return whether the code after the loop reads variables that an iteration assigns.

        Where a resumed run goes on at the end of a pass, there was no iteration.
        """
        return any(loop_variables(frame.f_code, frame.f_lasti).read_after for frame in iterating_frames())

    def _known(self) -> dict[int, str]:
        """Return names of kept objects, layers and tensors by address; containers can hold them."""
        named = module_anchors(ModuleIndex.of(self._objects.modules).now()) | self._objects.kept.named
        return {id(one): f"kept {name}" for name, one in named.items()}

    def _kept_ids(self) -> set[int]:
        kept, modules = self._objects.kept, self._objects.modules.modules()
        named = [*kept.replicated.values(), *kept.named.values(), *kept.given, self._objects.state]
        optimizers = kept.optimizers.values()
        groups = [part for one in optimizers for part in (one.param_groups, *one.param_groups)]
        states = [getattr(one, "state", None) for one in optimizers]  # one that wraps another can have none
        return {id(one) for one in (*modules, *named, *groups, *states) if one is not None}


class VariableWatch:
    """Names, once each, the variables that change from one iteration to the next.

    Args:
        variables: the variables.
        saved: returns the places in snapshots of all objects that a restore fills, by their addresses.
    """

    def __init__(self, variables: ScriptVariables, saved: Callable[[], Mapping[int, str]]) -> None:
        self._variables, self._saved = variables, saved
        #: of the objects that each attempt builds: the others, a resumed script does not have in its variables
        self._built = saved()
        #: digest of each variable, and its object if each attempt builds it: no other one can come to have its address
        self._first: dict[str, dict[str, tuple[str, object]]] = {}
        self._looks: dict[str, int] = {}
        self._named: set[str] = set()

    def begin(self, what: str) -> None:
        """Begin to compare: in a new pass, or in a new call of `epochs`."""
        self._first.pop(what, None)

    def look(self, what: str) -> None:
        """Compare the variables with those at the first boundary of this pass or call."""
        self._looks[what] = looks = self._looks.get(what, 0) + 1
        if looks > _LOOKS and not is_checked_at(looks):
            return
        now = self._variables.with_objects()
        first = self._first.setdefault(
            what, {name: (digest, one if id(one) in self._built else None) for name, (digest, one) in now.items()}
        )
        changed = [name for name, (digest, _) in now.items() if name in first and first[name][0] != digest]
        new = [name for name in changed if name not in self._named]
        if self._variables.speaks and new:
            filled = self._built.items() & self._saved().items()
            addresses = {address for address, _ in filled}
            new = [name for name in new if first[name][1] is not now[name][1] or id(now[name][1]) not in addresses]
        if self._variables.speaks and new:
            self._named.update(new)
            log.warning(
                "changes from one iteration to the next, and is part of no snapshot: %s. If it decides what is trained "
                "or logged, %s",
                format_names(by_object := _by_object(new)),
                _way_to_keep(by_object[0], now[new[0]][1]),
            )


def _way_to_keep(name: str, value: object) -> str:
    """Return advice on how to keep the variable called `name`."""
    if is_loader_pass(value):
        return "iterate over the result of loop.loader(...) for its loader"
    if isinstance(value, GeneratorType):
        return "read its loaders by loop.loader(...), and keep other values of the generator in loop.state"
    variable, _, attributes = name.partition(" in ")[0].partition(" ")
    owner = variable.partition(".")[0].partition("[")[0]
    if attributes or owner != variable:
        return f"keep its object: loop.keep(name={owner})"
    return f"write loop.state.{variable} in its place, or keep the object: loop.keep(name={variable})"


def outside_of_frames(objects: LoopObjects) -> Callable[[Objects], Callable[[], Iterator[tuple[str, object]]]]:
    """Return the arguments of `loop_state` for values that no snapshot holds."""
    frame = next(iterating_frames(), None)
    variables = frame.f_globals if frame is not None and frame.f_code.co_name == "<module>" else {}

    def watched(graph: Objects) -> Iterator[tuple[str, object]]:
        left_out = _module_variables(variables)
        yield from ((name, value) for name, value in outer_values(objects, graph) if name not in left_out)

    return lambda graph: lambda: watched(graph)


def _values(name: str, value: Any, kept: set[int], own: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """Yield a variable; for a user's object its attributes, for a function or partial its own.

    Args:
        name: of the variable.
        value: its value; of a method, its object counts.
        kept: addresses of what snapshots hold; nothing is yielded of these.
        own: variables that functions share with their frame, which tells of them itself.
    """
    if isinstance(value, (MethodType, BuiltinMethodType)):
        value = value.__self__
    if id(value) in kept:
        return
    is_users = is_user_class(type(value)) and not isinstance(value, nn.Module)
    if not (is_users or isinstance(value, _CALLED)):
        yield name, value
    for step, one in _parts(value, own, is_users=is_users):
        if is_users and not isinstance(one, _CALLED):
            yield name + step, one
        else:
            yield from _values(name + step, one, kept | {id(value)}, own)


def _parts(value: Any, own: frozenset[str], *, is_users: bool) -> Iterator[tuple[str, Any]]:
    """Yield values of a function or partial, attributes of an object, functions in a container."""
    if isinstance(value, FunctionType):
        held = function_values(value) if is_user_file(value.__code__.co_filename) else {}
        yield from ((f".{key}", one) for key, one in held.items() if key not in own)
    elif isinstance(value, partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif is_users:
        yield from ((f".{key}", one) for key, one in attributes_of(value).items())
    elif isinstance(value, (list, tuple, dict)) and len(value) <= _MOST_ITEMS:
        yield from ((f"[{key!r}]", one) for key, one in items_of(value) or () if isinstance(one, _CALLED))


def _by_object(names: Sequence[str]) -> list[str]:
    """Return names of variables, with those of one object's attributes as one.

    >>> _by_object(["meter.sum in train", "meter.count in train", "step in train", "net.calls in train"])
    ['meter (sum, count) in train', 'step in train', 'net.calls in train']
    """
    found: dict[tuple[str, str], list[str]] = {}
    for name in names:
        path, _, place = name.partition(" in ")
        variable, _, attribute = path.partition(".")
        found.setdefault((variable, place), []).append(attribute)
    return [
        f"{variable} ({format_names(attributes)}) in {place}"
        if len(attributes) > 1
        else f"{'.'.join([variable, *filter(None, attributes)])} in {place}"
        for (variable, place), attributes in found.items()
    ]


def code_in_loop() -> Iterator[object]:
    """Yield the functions, classes and objects of the user's that the rest of the loop reads."""
    for frame in iterating_frames():
        variables = {**frame.f_globals, **frame.f_locals}
        for name in loop_variables(frame.f_code, frame.f_lasti).carried & variables.keys():
            value = variables[name]
            yield value if isinstance(value, (*_CALLED, MethodType, type)) else type(value)


def iterating_frames() -> Iterator[FrameType]:
    """Yield the user's frames that iterate over the loop: generators, then their reader."""
    for frame in script_frames():
        if is_user_file(frame.f_code.co_filename):
            yield frame
            if not frame.f_code.co_flags & _CO_GENERATOR:
                return
        elif frame.f_code.co_filename.startswith(_DRIVERS):
            return


def _module_variables(variables: Mapping[str, Any]) -> set[str]:
    """Return the `variables` of an iterating module by the names of globals, without functions'."""
    functions = [function for value in [*variables.values()] for function in functions_of(value)]
    named = frozenset[str]().union(*(global_reads(function.__code__) for function in functions))
    return {f"global {variables.get('__name__')}.{name}" for name in variables if name not in named}


def is_watched(value: object, kept: set[int]) -> bool:
    """Return whether a value can be state: neither kept, nor code, nor a clock's reading."""
    if id(value) in kept or is_code(value) or isinstance(value, (LoopLoader, DataLoader)):
        return False
    if isinstance(value, GeneratorType):
        return is_user_file(value.gi_code.co_filename) and not reads_loop(value)
    if isinstance(value, nn.Module):
        return id(unwrapped(value)) not in kept
    if isinstance(value, float):
        return not is_of_clock(value)
    is_known = is_user_class(type(value)) or is_counted_in(value) or isinstance(value, (Generator, Stateful))
    return (is_known or is_loader_pass(value)) and not type(value).__module__.startswith("midstride.engine.loop")


def _digest(value: Any, known: Callable[[], Mapping[int, str]]) -> str:
    """Return text that tells of `value`; of an object of a library with a state, of this state.

    Args:
        value: of a variable.
        known: returns names of kept objects by address, which take a while with thousands of layers.
    """
    if is_loader_pass(value):
        return f"after {batches_read(value)} batches"
    if isinstance(value, Stateful) and not isinstance(value, nn.Module) and not is_user_class(type(value)):
        value = value.state_dict()
    lines = digest_lines("", value, {} if type(value) in PLAIN else known())
    if isinstance(value, nn.Module):
        tensors = (one for one in itertools.chain(value.parameters(), value.buffers()) if id(one) not in known())
        lines["tensors"] = str([tensor_digest(tensor, _SAMPLE_BYTES) for tensor in tensors])
    if len(lines) == 1 and "" in lines:
        return lines[""]
    return f"{type(value).__name__} {xxh3_64_hexdigest(repr(sorted(lines.items())).encode())[:8]}"


def _place(frame: FrameType) -> str:
    name = frame.f_code.co_name
    return "the script" if name == "<module>" else name
