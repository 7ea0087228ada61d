"""Maps memory of a snapshot's tensors to memory of the live tensors with their values."""

import torch
from torch import Tensor

__all__ = ["RestoredMemory"]

_OWN = -1  # no address


class RestoredMemory:
    """Makes tensors share memory if and only if they shared it when the snapshot was taken.

    Args:
        device: where tensors are put that were on an accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
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
        return self._saved.get(theirs, ours) == ours and self._live.get(ours, theirs) == theirs

    def take(self, live: Tensor, saved: Tensor) -> None:
        """Record that `live` takes the values of `saved`, which maps their memory to each other."""
        if _has_address(live) and saved.numel():
            ours, theirs = live.untyped_storage().data_ptr(), saved.untyped_storage().data_ptr()
            self._saved[theirs], self._live[ours] = ours, theirs
            self._met.append(saved)
            further = int(live.storage_offset() - saved.storage_offset()) * live.element_size()
            self._takers.setdefault(theirs, (live, further))

    def place(self, saved: Tensor, *, was_on_host: bool) -> Tensor:
        """Return a new tensor with values of `saved`, in memory shared as before."""
        if not was_on_host and not saved.is_cpu:
            return saved  # a copy that was made in this process
        if not saved.numel() or saved.layout != torch.strided or (not was_on_host and self._device.type == "xla"):
            return saved if was_on_host else saved.to(self._device)
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
            self._moved[address] = torch.empty(0, dtype=torch.uint8).set_(storage).to(self._device)
        return self._moved[address].view(saved.dtype).as_strided(saved.shape, saved.stride(), saved.storage_offset())


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
