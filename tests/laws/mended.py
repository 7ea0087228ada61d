"""Code that its user mends after a failure, one row each: the same classes by name, with another body."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from laws.objects.small import Rows, Small
from torch import Tensor, nn
from torch.utils.data import DataLoader

from midstride.engine import Callback, DataModule

Made = tuple[Callable[[], Small], Callable[[], Any] | None, Callable[[], list[Callback]]]


def _module(build: Callable[[Any], None]) -> Made:
    class Module(Small):
        calls = 0.0

        def build(self) -> None:
            self.calls = 0.0
            build(self)

        def factor(self, batch: Tensor) -> Any:
            self.calls += 1
            return self.calls

        def first(self) -> int:
            return 1

        def second(self) -> int:
            return 2

    return Module, None, list


def _set(**attributes: Any) -> Made:
    return _module(lambda module: vars(module).update(attributes))


def _nested(**attributes: Any) -> Made:
    class Part:
        def __init__(self) -> None:
            vars(self).update(attributes)

    return _module(lambda module: vars(module).update(parts=[Part()]))


def _slots(*names: str) -> Made:
    class Part:
        __slots__ = names

        def __init__(self) -> None:
            for name in names:
                setattr(self, name, 1)

    return _module(lambda module: vars(module).update(part=Part()))


def _property(is_mended: bool) -> Made:
    class Part:
        def __init__(self) -> None:
            if not is_mended:
                self.size = 1

    if is_mended:
        Part.size = property(lambda self: 2)
    return _module(lambda module: vars(module).update(part=Part()))


def _fields(names: str) -> Made:
    pair = NamedTuple("Pair", [(name, int) for name in names])
    pair.__qualname__ = "Pair"
    return _module(lambda module: vars(module).update(pair=pair(*range(len(names)))))


def _act(name: str) -> Made:
    return _module(lambda module: vars(module).update(act=getattr(module, name)))


def _part(is_mended: bool) -> Made:
    class Noise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = 1.0
            self.register_buffer("offset", torch.ones(1), persistent=False)

    return _module(lambda module: setattr(module, "noise", Noise()) if is_mended else None)


def _buffer(is_mended: bool) -> Made:
    def build(module: Any) -> None:
        if is_mended:
            module.register_buffer("scale", torch.ones(1), persistent=False)
        else:
            module.scale = 1.0

    return _module(build)


def _dropout(is_mended: bool) -> Made:
    return _module(lambda module: setattr(module, "drop", nn.Dropout(0.5)) if is_mended else None)


def _callback(counts: bool, **attributes: Any) -> Made:
    class Acting(Callback):
        def __init__(self) -> None:
            if counts:
                self.batches = 0
            vars(self).update(attributes)

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if counts:
                self.batches += 1

    return Small, None, lambda: [Acting()]


def _data(**attributes: Any) -> Made:
    class Set(Rows):
        def __init__(self) -> None:
            super().__init__()
            vars(self).update(attributes)

    class Data(DataModule):
        def __init__(self) -> None:
            self.told = 0
            vars(self).update(attributes)

        def train_dataloader(self) -> Any:
            self.told += 1
            return DataLoader(Set(), 4, shuffle=True)

    class Module(Small):
        def train_dataloader(self) -> Any:
            return None

    return Module, Data, list


def _callbacks(count: int) -> Made:
    kind, _, callbacks = _callback(counts=True)
    return kind, None, lambda: [one for _ in range(count) for one in callbacks()]


#: name -> the code before and after, what is said of it, and what the module holds in the end
MENDED: dict[str, tuple[Made, Made, str, dict[str, Any]]] = {
    "added": (_set(), _set(more=[1]), r"new, and as built: module\.more", {"more": [1], "calls": 5.0}),
    "removed": (_set(less=[1]), _set(), r"gone, and dropped: module\.less", {"less": None}),
    "renamed": (_set(old=1), _set(name=1), r"module\.old; new, and as built: module\.name", {"old": None, "name": 1}),
    "default": (_set(rate=1.0), _set(rate=2.0), r"snapshot's holds: module\.rate \(1\.0, now 2\.0\)", {"rate": 1.0}),
    "method": (_act("first"), _act("second"), r"the new one holds: module\.act \(.*first, now .*second\)", {}),
    "in a part": (_nested(a=1), _nested(b=2), r"module\.parts\.0\.a; new, and as built: module\.parts\.0\.b", {}),
    "slots": (_slots("a", "b"), _slots("b", "c"), r"module\.part\.a; new, and as built: module\.part\.c", {}),
    "property": (_property(False), _property(True), r"gone, and dropped: module\.part\.size", {}),
    "fields": (
        _fields("ab"),
        _fields("abc"),
        r"keep those of this attempt's code: module\.pair .*2 fields",
        {"pair": (0, 1, 2)},
    ),
    "a submodule": (_part(False), _part(True), r"new, and as built: module\.noise", {}),
    "no submodule": (_part(True), _part(False), r"gone, and dropped: module\.noise", {}),
    "a layer of torch's": (_dropout(False), _dropout(True), r"other submodules .* new, and as built: drop", {}),
    "no layer": (_dropout(True), _dropout(False), r"other submodules .* gone, and dropped: drop", {}),
    "a new buffer": (_buffer(False), _buffer(True), r"other buffers .* new, and as built: scale", {}),
    "no buffer": (_part(True), _part(False), r"other buffers .* gone, and dropped: noise\.offset", {}),
    "a buffer": (_buffer(False), _buffer(True), r"gone, and dropped: module\.scale", {"scale": torch.ones(1)}),
    "callback": (_callback(True), _callback(True, patience=3), r"as built: callbacks\.Acting\.patience", {}),
    "callback's count": (_callback(True), _callback(False), r"gone, and dropped: callbacks\.Acting\.batches", {}),
    "no callback": (_callbacks(1), _callbacks(0), r"gone, and dropped: callbacks\.Acting", {}),
    "data": (_data(), _data(mosaic=1), r"new, and as built: data\.module\.mosaic, data\.training\.mosaic", {}),
}
