"""Live variables: those that an iteration leaves to the next one, by bytecode."""

import dis
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FunctionType

from midstride.engine.objects.user_modules import global_reads

__all__ = ["LoopVariables", "attributes_set_in", "loop_variables"]

_ENDS = frozenset({"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"})
_JUMPS = frozenset({"JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE"})
_KINDS = ("FAST", "NAME", "DEREF", "GLOBAL", "CLOSURE", "CLASSDEREF")
#: names of comprehensions and the like, which run where they are written
_INLINE = "<"


@dataclass(frozen=True)
class LoopVariables:
    """The variables of a frame that waits for the next item of an iterator.

    Args:
        carried: those that the rest of the frame may read before it assigns them, without those that each iteration
            assigns first.
        read_after: those that each iteration assigns, and that the code after the loop reads.
        assigned: those that each iteration assigns.
    """

    carried: frozenset[str] = frozenset()
    read_after: frozenset[str] = frozenset()
    assigned: frozenset[str] = frozenset()


@lru_cache(maxsize=64)
def loop_variables(code: CodeType, offset: int) -> LoopVariables:
    """Return the variables of `code` that waits at the instruction at `offset`."""
    flow = _Flow(code)
    at = flow.index.get(offset)
    if at is None:
        return LoopVariables()
    live = flow.live()
    carried = flow.live_after(at, live)
    if flow.instructions[at].opname != "FOR_ITER":
        return LoopVariables(carried)
    _, end = flow.next[at]
    assigned = flow.assigned_by(at)
    return LoopVariables(carried, (live[end] & assigned) - carried, assigned)


def attributes_set_in(kind: type) -> frozenset[str]:
    """Return the attributes that the functions of a class set, on whatever object."""
    functions = [getattr(value, "__wrapped__", value) for value in vars(kind).values()]
    codes = [function.__code__ for function in functions if isinstance(function, FunctionType)]
    return frozenset(
        str(one.argval) for code in codes for one in dis.get_instructions(code) if one.opname == "STORE_ATTR"
    )


class _Flow:
    """The instructions of a code object, and which may follow each."""

    def __init__(self, code: CodeType) -> None:
        self.instructions = list(dis.get_instructions(code))
        self.index = {one.offset: at for at, one in enumerate(self.instructions)}
        self.next = [tuple(self._followers(at)) for at in range(len(self.instructions))]
        self._assigned: dict[int, frozenset[str]] = {}
        self.effects = [tuple(_effects(one)) for one in self.instructions]
        for at, one in enumerate(self.instructions):
            if one.opname == "LOAD_FAST_AND_CLEAR":
                self._hide(str(one.argval), at)

    def _hide(self, name: str, begin: int) -> None:
        """Drop the effects on `name` inside a comprehension that has a variable of this name.

        From Python 3.12 on, a comprehension has no frame of its own. The instruction at `begin` puts the frame's
        variable aside. The first one on `name` after the comprehension's `for` puts it back.
        """
        ends = (self.index[one.argval] for one in self.instructions[begin:] if one.opname == "FOR_ITER")
        end = next(ends, begin)
        for at in range(begin, len(self.effects)):
            left = tuple(effect for effect in self.effects[at] if effect[1] != name)
            is_back = at >= end and left != self.effects[at]
            self.effects[at] = left
            if is_back:
                return

    def _followers(self, at: int) -> Iterator[int]:
        one = self.instructions[at]
        if one.opname not in _ENDS | _JUMPS and at + 1 < len(self.instructions):
            yield at + 1
        if one.opcode in dis.hasjrel or one.opcode in dis.hasjabs:
            yield self.index[one.argval]

    def live(self) -> list[frozenset[str]]:
        """Return for each instruction the variables that can be read before an assignment."""
        live: list[frozenset[str]] = [frozenset()] * len(self.instructions)
        is_changed = True
        while is_changed:
            is_changed = False
            for at in range(len(self.instructions) - 1, -1, -1):
                now = set(self.live_after(at, live))
                for is_read, name in reversed(self.effects[at]):
                    (now.add if is_read else now.discard)(name)
                if frozenset(now) != live[at]:
                    live[at], is_changed = frozenset(now), True
        return live

    def live_after(self, at: int, live: list[frozenset[str]]) -> frozenset[str]:
        """Return the variables that can be read after an instruction, with one turn of a `for`."""
        if self.instructions[at].opname != "FOR_ITER":
            return frozenset[str]().union(*(live[one] for one in self.next[at]))
        body, end = self.next[at]
        return live[body] | (live[end] - self.assigned_by(at))

    def assigned_by(self, at: int) -> frozenset[str]:
        """Return the variables that each iteration of the `for` at `at` assigns."""
        if at not in self._assigned:
            self._assigned[at] = frozenset()  # for an inner `for` whose `break` leads back here
            self._assigned[at] = self._assigned_from(self.next[at][0], at)
        return self._assigned[at]

    def _assigned_from(self, begin: int, end: int) -> frozenset[str]:
        """Return what is assigned on every way from `begin` to `end`, with one turn of a `for`."""
        known: dict[int, frozenset[str]] = {begin: frozenset()}
        queue = [begin]
        while queue:
            at = queue.pop()
            if at == end:
                continue
            now = known[at] | {name for is_read, name in self.effects[at] if not is_read}
            is_for = self.instructions[at].opname == "FOR_ITER"
            for one in self.next[at]:
                then = now | self.assigned_by(at) if is_for and one == self.next[at][1] else now
                merged = then if one not in known else known[one] & then
                if merged != known.get(one):
                    known[one] = merged
                    queue.append(one)
        return known.get(end, frozenset())


def _effects(one: dis.Instruction) -> Iterator[tuple[bool, str]]:
    """Yield the effects of an instruction on variables: whether it reads, and the name."""
    verb, _, kind = one.opname.partition("_")
    if one.opname == "LOAD_CONST" and isinstance(one.argval, CodeType) and one.argval.co_name.startswith(_INLINE):
        yield from ((True, name) for name in global_reads(one.argval))
    if verb not in ("LOAD", "STORE", "DELETE") or not kind.startswith(_KINDS):
        return
    names = one.argval if isinstance(one.argval, tuple) else (one.argval,)  # Python joins two instructions to one
    verbs = [part for part in one.opname.split("_") if part in ("LOAD", "STORE", "DELETE")]
    for name, does in zip(names, verbs if len(verbs) == len(names) else verbs[:1] * len(names), strict=True):
        if name is not None:
            yield does == "LOAD", str(name)
