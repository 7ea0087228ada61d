"""Python generators that a sampler made in `__init__`, as iterators with a state."""

import copy
import gc
import inspect
from collections.abc import Iterator
from itertools import islice
from types import CodeType, FunctionType, GeneratorType
from typing import Any, Self

from midstride.engine.data.iterable.content_digest import content_digest
from midstride.engine.data.sampler_state import samplers_in
from midstride.engine.errors import NotExact
from midstride.engine.objects.attributes import own_dict, set_attribute
from midstride.engine.seeds import mix

__all__ = ["RunningGenerator", "keep_generators"]


def keep_generators(sampler: Any) -> Any:
    """Return `sampler`, with generators that have not begun as iterators that can begin again."""
    if isinstance(sampler, GeneratorType):
        return RunningGenerator.of(sampler) or sampler
    for one in samplers_in(sampler):
        for name, value in [*own_dict(one).items()]:
            if isinstance(value, GeneratorType) and (kept := RunningGenerator.of(value)) is not None:
                set_attribute(one, name, kept)
    return sampler


class RunningGenerator(Iterator[Any]):
    """An iterator of a generator function; a state or copy draws its earlier items again.

    It has no `close`, which `yield from` would call at the end of an epoch that a limit cuts short.

    Args:
        function: generator function.
        given: its positional and keyword arguments.
    """

    def __init__(self, function: FunctionType, given: tuple[list[Any], dict[str, Any]]) -> None:
        self._function, self._given = function, given
        #: None until the next item is needed, as a copy of its arguments may not be whole before
        self._generator: Iterator[Any] | None = None
        self._drawn = self._digest = 0

    @classmethod
    def of(cls, generator: "GeneratorType[Any, Any, Any]") -> Self | None:
        """Return an iterator like `generator`; None if it has begun, or reads from an iterator."""
        code, frame = generator.gi_code, generator.gi_frame
        if inspect.getgeneratorstate(generator) != inspect.GEN_CREATED or frame is None:
            return None
        values: dict[str, Any] = dict(frame.f_locals)
        if any(hasattr(type(value), "__next__") for value in values.values()):
            return None
        # Python shows the function, with the variables that others can set, to its collector alone.
        held = [one for one in gc.get_referents(generator) if isinstance(one, FunctionType) and one.__code__ is code]
        return cls(held[0], _arguments(code, values)) if len(held) == 1 else None

    def __next__(self) -> Any:
        item = next(self._begin() if self._generator is None else self._generator)
        self._count(item)
        return item

    def send(self, value: Any) -> Any:
        """Return the next item; a generator that receives values could not draw its items again.

        Raises:
            NotExact: `value` is not None.
        """
        if value is not None:
            raise self._depends_on("send")
        return next(self)

    def throw(self, *error: Any) -> Any:
        """Refuse, since a generator that handles errors could not draw its items again.

        Raises:
            NotExact: always.
        """
        raise self._depends_on("throw")

    def _depends_on(self, method: str) -> NotExact:
        return NotExact(
            f"the generator {self._function.__name__} of a sampler is controlled by {method}(), which a resumed run "
            "cannot repeat. Keep its state in attributes of the sampler, and call the generator function in __iter__."
        )

    def _begin(self) -> Iterator[Any]:
        """Begin, and draw the items before the position again; return the generator.

        Raises:
            NotExact: they are other ones.
        """
        drawn, digest = self._drawn, self._digest
        positional, named = self._given
        generator: Iterator[Any] = self._function(*positional, **named)
        self._generator, self._drawn, self._digest = generator, 0, 0
        for item in islice(generator, drawn):
            self._count(item)
        if (self._drawn, self._digest) != (drawn, digest):
            raise NotExact(
                f"the generator {self._function.__name__} of a sampler gives other items than before: "
                "its data have changed. Call the generator function in __iter__ instead."
            )
        return generator

    def _count(self, item: Any) -> None:
        self._drawn += 1
        self._digest = mix(self._digest, item if type(item) is int else content_digest(item))

    def __deepcopy__(self, memo: dict[int, Any]) -> "RunningGenerator":
        other = memo[id(self)] = RunningGenerator(self._function, ([], {}))
        other._given = copy.deepcopy(self._given, memo)
        other._drawn, other._digest = self._drawn, self._digest
        return other

    def state_dict(self) -> dict[str, int]:
        """Return the number of items drawn, and their digest."""
        return {"drawn": self._drawn, "digest": self._digest}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after that number of items."""
        if state != self.state_dict():
            self._generator, self._drawn, self._digest = None, state["drawn"], state["digest"]


def _arguments(code: CodeType, values: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the positional and keyword arguments of a call of `code` with these variables."""
    names, positional = code.co_varnames, code.co_argcount
    end = positional + code.co_kwonlyargcount
    named = {name: values[name] for name in names[positional:end]}
    given = [values[name] for name in names[:positional]]
    if code.co_flags & inspect.CO_VARARGS:
        given += values[names[end]]
        end += 1
    return given, {**named, **values[names[end]]} if code.co_flags & inspect.CO_VARKEYWORDS else named
