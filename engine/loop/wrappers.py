"""Wrappers of a loop's loader, such as `enumerate`: continued in a resumed pass, or refused.

A `for` over `enumerate(train)` would count from 0 again where a pass goes on. Python offers no way to set the count, so
it is written into the object's memory, and read back by `__reduce__`.
"""

import ctypes
import gc
import inspect
import itertools
from collections.abc import Generator, Iterator
from types import GeneratorType
from typing import Any

from midstride.engine.errors import NotExact, UserError
from midstride.engine.loop.frames import collects_items, script_frames

__all__ = ["continue_wrappers"]

#: wrappers that hold items or counts of their own -> the way out
_REFUSED: dict[type, str] = {
    itertools.islice: "leave the loop by break, or call loop.steps(train, number)",
    itertools.cycle: "iterate over the loader again for each pass, or call loop.steps(train, number)",
    itertools.pairwise: "keep the item before in loop.state",
    itertools.accumulate: "keep the sum in loop.state",
    itertools.zip_longest: "zip loaders of the loop",
    **(
        {batched: "give the DataLoader a larger batch_size"} if (batched := getattr(itertools, "batched", None)) else {}
    ),
}
#: wrappers that pass items on
_PASSES_ON = (map, filter, itertools.chain, itertools.starmap, itertools.takewhile)
#: wrappers of wrappers that are followed
_DEEPEST = 5


def continue_wrappers(iterator: Generator[Any, None, None] | None, done: int) -> None:
    """Let wrappers around `iterator`, such as enumerate, continue after `done` items.

    Args:
        iterator: an iterator of the loop, before it returns its first item in this process.
        done: number of items that earlier attempts returned in this pass.

    Raises:
        UserError: a wrapper holds items or counts that no snapshot has.
    """
    if iterator is None:
        return
    _refuse_collections()
    wrappers = [one for reader in (iterator, *_reading_generators()) for one in _wrappers(reader, _DEEPEST)]
    for wrapper in {id(one): one for one in wrappers}.values():
        if (way_out := _REFUSED.get(type(wrapper))) is not None:
            name = type(wrapper).__name__
            raise UserError(
                f"{name} around a loader of the loop: a resumed run would lose the items that {name} holds. Instead, "
                f"{way_out}"
            )
        if isinstance(wrapper, zip):
            _check_zip(wrapper, getattr(iterator, "gi_code", None))
        elif isinstance(wrapper, enumerate) and done:
            _advance(wrapper, done)


def _refuse_collections() -> None:
    for frame in script_frames():
        if collects_items(frame):
            raise UserError(
                "a comprehension, or a call such as sum or list, around a loader of the loop: a resumed run would "
                "lose what is collected. Write a for loop, and keep the list or sum in loop.state"
            )
        if not frame.f_code.co_flags & inspect.CO_GENERATOR:
            return


def _wrappers(iterator: object, depth: int) -> Iterator[Any]:
    """Yield the iterators that read `iterator`, directly or by another one."""
    kinds = (enumerate, zip, *_PASSES_ON, *_REFUSED)
    for found in gc.get_referrers(iterator) if depth else ():
        if isinstance(found, (*kinds, tuple)):  # zip has a tuple of what it joins
            if not isinstance(found, tuple):
                yield found
            yield from _wrappers(found, depth - 1)


def _reading_generators() -> Iterator[object]:
    """Yield the generators that wait for an item of the loop, the innermost first."""
    for frame in script_frames():
        if not frame.f_code.co_flags & inspect.CO_GENERATOR:
            return
        # While a generator runs, nothing tells what it iterates over.
        yield from (one for one in gc.get_objects() if type(one) is GeneratorType and one.gi_frame is frame)


def _check_zip(wrapper: Any, own: object) -> None:
    others = [one for one in wrapper.__reduce__()[1] if getattr(one, "gi_code", None) is not own]
    if others:
        raise UserError(
            f"zip of a loader of the loop with a {type(others[0]).__name__}, which a resumed run would read from its "
            "start. Wrap that one by loop.loader, too, or count in loop.state"
        )


def _advance(wrapper: Any, done: int) -> None:
    """Add `done` to the count of an `enumerate`."""
    begins = wrapper.__reduce__()[1][1]
    # The count is the first field of the object after what every object has.
    ctypes.c_ssize_t.from_address(id(wrapper) + object.__basicsize__).value += done
    if (now := wrapper.__reduce__()[1][1]) != begins + done:
        raise NotExact(
            f"enumerate around a loader of the loop counts from {now} instead of {begins + done}: this Python keeps "
            "its count elsewhere. Count in loop.state instead"
        )
