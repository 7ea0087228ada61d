"""Modules with state besides their weights: those that a resumed run restores, and those that are named.

A case is a class of this folder that extends `Small`. It is restored, unless it has the text of a warning (`warns`) or
of a refusal (`refused`).
"""

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import laws.objects
from laws.objects.slots import SlottedCallback, SlottedData, TellsSlots
from laws.objects.small import Small
from laws.objects.structure import Rising
from laws.objects.surroundings import (
    LISTED,
    Counting,
    Curriculum,
    Forgetful,
    LockedCallback,
    OfTensors,
    Opened,
    OpenRow,
    Telling,
    TellingWrapped,
    Watching,
    Wrapped,
    WritesTensors,
)
from laws.objects.unsaved import Deaf

from midstride.engine import Callback

#: what makes the module, the data or None, and the callbacks
Made = tuple[Callable[[], Small], Callable[[], Any] | None, Callable[[], list[Callback]]]
#: files whose classes have tests of their own, and classes that need data or a test of their own
OTHER_FILES = {"devices", "ranked", "table", "together"}
OTHERS = {
    *(Small, TellsSlots, Telling, TellingWrapped, Watching, WritesTensors),
    *("DropsInValidation", "Levelled", "LockedByRank", "TellsBetweenEpochs"),
}

FILES = [file.name for file in pkgutil.iter_modules(laws.objects.__path__) if file.name not in OTHER_FILES]
CASES: list[type[Small]] = [
    kind
    for name in FILES
    for kind in vars(importlib.import_module(f"laws.objects.{name}")).values()
    if isinstance(kind, type) and issubclass(kind, Small) and kind.__module__ == f"laws.objects.{name}"
    if not kind.__name__.startswith("_") and not {kind, kind.__name__} & OTHERS
]

#: name -> what a resumed run has as the run before had it
KEPT: dict[str, Made] = {
    kind.__name__: (kind, None, list) for kind in CASES if not {"warns", "refused"} & {*vars(kind)}
}
KEPT |= {
    "callback": (Small, None, lambda: [Forgetful()]),
    "a callback in a list of the script": (Small, None, lambda: LISTED),
    "a callback whose state has one row twice": (Small, None, lambda: [OpenRow()]),
    "the class of a callback": (Small, None, lambda: [Rising()]),
    "data of the module": (Watching, None, lambda: [Curriculum()]),
    "data": (Telling, Counting, list),
    "data that torch wraps": (TellingWrapped, Wrapped, list),
    "slots": (TellsSlots, SlottedData, lambda: [SlottedCallback()]),
    "slots, read in workers": (TellsSlots, lambda: SlottedData(workers=1), lambda: [SlottedCallback()]),
    "data of torch": (WritesTensors, OfTensors, list),
}

#: name -> what is named, whether it is refused, and the words
NAMED: dict[str, tuple[Made, bool, str]] = {
    kind.__name__: ((kind, None, list), "refused" in vars(kind), words)
    for kind in CASES
    if (words := vars(kind).get("refused") or vars(kind).get("warns"))
}
NAMED |= {
    "a callback": ((Small, None, lambda: [Deaf()]), True, "the callbacks, before the first step, did not load"),
    "beside the module": (
        (Small, Opened, lambda: [LockedCallback()]),
        False,
        r"not part of snapshots: callbacks\.LockedCallback\.lock, a lock, data\.module\.locks\.0, a lock, "
        r"data\.module\.locks\.1, a lock, data\.training\.file, a TextIOWrapper, "
        r"samplers\.sampler of training\.lock, a lock\. ",
    ),
    "of a sampler": (
        (Small, Opened, list),
        False,
        r"not part of snapshots: .*samplers\.sampler of training\.lock, a lock\. If",
    ),
}
