"""Maps memory of a snapshot's tensors and arrays to that of live ones with their values."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from midstride.engine.objects.array_memory import ArrayMemory, bounds_of
from midstride.engine.state.differences import differences

__all__ = ["FilledArrays", "RestoredMemory"]

_OWN = -1  # no address


class RestoredMemory:
    """Makes tensors share memory if and only if they shared it when the snapshot was taken.

    Args:
        device: where tensors are put that were on an accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._saved: dict[int, int] = {}  # address of a memory in the snapshot -> of the live one that stands for it
        self._live: dict[int, int] = {}  # and back
        self._takers: dict[int, tuple[Tensor, int]] = {}  # a live tensor there, and how many bytes further it begins
        self._moved: dict[int, Tensor] = {}  # that memory on the device
        self._met: list[Tensor] = []  # of the snapshot; kept, so that no other memory gets such an address

    def fits(self, live: Tensor, saved: Tensor) -> bool:
        """Return whether the memory of `live` may be mapped to that of `saved`."""
        if not _has_address(live) or not saved.numel():
            return True
        ours, theirs = live.untyped_storage().data_ptr(), saved.untyped_storage().data_ptr()
        if self._saved.get(theirs, ours) != ours or self._live.get(ours, theirs) != theirs:
            return False
        if live.is_cpu and _strides(live) != _strides(saved):
            return False
        return theirs not in self._takers or self._takers[theirs][1] == _further_bytes(live, saved)

    def take(self, live: Tensor, saved: Tensor) -> None:
        """Record that `live` takes the values of `saved`, which maps their memory to each other."""
        if _has_address(live) and saved.numel():
            ours, theirs = live.untyped_storage().data_ptr(), saved.untyped_storage().data_ptr()
            self._saved[theirs], self._live[ours] = ours, theirs
            self._met.append(saved)
            self._takers.setdefault(theirs, (live, _further_bytes(live, saved)))

    def place(self, saved: Tensor, *, was_on_host: bool) -> Tensor:
        """Return a new tensor with values of `saved`, in memory shared as before."""
        if not was_on_host and not saved.is_cpu:
            return saved  # a copy that was made in this process
        if not saved.numel() or saved.layout != torch.strided or (not was_on_host and self.device.type == "xla"):
            return saved if was_on_host else saved.to(self.device)
        storage = saved.untyped_storage()
        address = storage.data_ptr()
        if address in self._takers and (view := _view(*self._takers[address], saved)) is not None:
            with torch.no_grad():
                return view.copy_(saved)
        self._saved.setdefault(address, _OWN)
        self._met.append(saved)
        if was_on_host:
            return saved
        if address not in self._moved:
            self._moved[address] = torch.empty(0, dtype=torch.uint8).set_(storage).to(self.device)
        return self._moved[address].view(saved.dtype).as_strided(saved.shape, saved.stride(), saved.storage_offset())


class FilledArrays:
    """Arrays of numpy, their rows, and tensors in them, filled in place by a restore.

    Args:
        arrays: the live arrays.
    """

    def __init__(self, arrays: Iterable[Any]) -> None:
        self._memory = ArrayMemory(arrays)
        self._filled: dict[tuple[int, int] | None, list[tuple[Any, Any]]] = {}  # by their memory

    def holds(self, live: Tensor) -> bool:
        """Return whether a tensor lies in the memory of an array."""
        return live.is_cpu and _has_address(live) and self._memory.span_of(live) is not None

    def fill(self, live: Any, saved: Any) -> bool:
        """Fill `live` and return True, unless this would change one that was filled before.

        Arrays that share memory in this attempt can have been apart when the snapshot was taken.
        """
        if isinstance(live, Tensor):
            live, saved = live.detach(), saved.detach()
        filled = self._filled.setdefault(self._memory.span_of(live) if live.nbytes else None, [])
        if not filled:
            _assign(live, saved)
        elif differences(live, saved):
            before = live.clone() if isinstance(live, Tensor) else live.copy()
            _assign(live, saved)
            if any(_overlap(live, one) and differences(one, its) for one, its in filled):
                _assign(live, before)
                return False
        filled.append((live, saved))
        return True


def _assign(live: Any, saved: Any) -> None:
    if isinstance(live, Tensor):
        live.copy_(saved)
    elif isinstance(live, np.ndarray):
        live[...] = saved
    else:
        for name in saved.dtype.names:
            live[name] = saved[name]


def _overlap(one: Any, other: Any) -> bool:
    """Return whether arrays, rows or tensors may have memory in common."""
    if not (one.nbytes and other.nbytes):
        return False
    (start, end), (begin, stop) = bounds_of(one), bounds_of(other)
    return start < stop and begin < end


def _further_bytes(live: Tensor, saved: Tensor) -> int:
    return int(live.storage_offset() - saved.storage_offset()) * live.element_size()


def _strides(tensor: Tensor) -> list[int]:
    """Return the strides of the dimensions with several items."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def _has_address(tensor: Tensor) -> bool:
    return bool(tensor.numel()) and tensor.device.type != "xla"


def _view(live: Tensor, further_bytes: int, saved: Tensor) -> Tensor | None:
    """Return the view of `live`'s memory that corresponds to `saved`; None beyond its end."""
    start, itemsize, storage = further_bytes // saved.element_size(), saved.element_size(), live.untyped_storage()
    start += int(saved.storage_offset())
    end = start + 1 + sum((n - 1) * s for n, s in zip(saved.shape, saved.stride(), strict=True))
    if further_bytes % itemsize or start < 0 or end * itemsize > storage.nbytes():
        return None
    return torch.empty(0, dtype=saved.dtype, device=live.device).set_(storage, start, saved.shape, saved.stride())
