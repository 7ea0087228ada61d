"""Tensors on their way to a file and back: copied, with their strides and the memory they share.

safetensors files hold plain, separate tensors. A tensor that is dense and shares its memory with no other is
written as it is, and its strides are noted in the document. Tensors that overlap (tied weights, views of one
buffer, expanded tensors) are written once: as one tensor if they are all the same view, else as the stretch of
bytes they lie in, from which they are cut out again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["Leaf", "rebuild", "stage"]

_ALIGN_BYTES = 16  # no element is larger
#: what a safetensors file can name; anything else goes as bytes
_NAMED = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.uint8, torch.complex64),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16),
    }
)


@dataclass(slots=True)
class Leaf:
    """A tensor found in a tree.

    Args:
        path: where it was found.
        tensor: detached.
        entry: what stands for it in the document, filled in by `stage`.
    """

    path: str
    tensor: Tensor
    entry: dict[str, Any]
    start: int = field(init=False)  # first address of its memory
    end: int = field(init=False)  # first address behind it
    is_plain: bool = field(init=False)  # whether its strides are those of a fresh tensor

    def __post_init__(self) -> None:
        tensor, shape, strides = self.tensor, self.tensor.shape, self.tensor.stride()
        self.start = self.end = tensor.data_ptr()
        self.is_plain = strides == _plain_strides(shape)
        if self.is_plain:
            self.end += tensor.nbytes
        else:
            self.entry["strides"] = list(strides)
            last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
            self.end += (last + 1) * tensor.element_size() if tensor.numel() else 0

    def is_same_view(self, other: "Leaf") -> bool:
        """Whether both see the same memory in the same way."""
        mine, its = self.tensor, other.tensor
        same_layout = mine.shape == its.shape and mine.stride() == its.stride()
        return self.start == other.start and mine.dtype == its.dtype and same_layout


def stage(leaves: list[Leaf]) -> dict[str, Tensor]:
    """Copy all `leaves` to the CPU, name the copies after their paths, and complete their entries."""
    staged: dict[str, Tensor] = {}
    for members in _overlapping(leaves):
        first = members[0]
        name = _free_name(first.path, staged)
        if (first.is_plain or _is_dense(first.tensor)) and all(first.is_same_view(leaf) for leaf in members[1:]):
            staged[name] = _plain_copy(first.tensor)
        else:
            staged[name] = _stretch_copy(members)
        for leaf in members:
            leaf.entry["name"] = name
    return staged


def rebuild(entry: Mapping[str, Any], tensors: Mapping[str, Tensor], memory: dict[str, Tensor]) -> Tensor:
    """Return the tensor an entry stands for, in fresh memory.

    Args:
        entry: what `stage` completed.
        tensors: what `stage` returned; never shared with the result.
        memory: name -> memory already rebuilt, so that what shared it shares it again.
    """
    name, dtype, shape = entry["name"], getattr(torch, entry["dtype"]), entry["shape"]
    strides = entry.get("strides") or _plain_strides(shape)
    if "offset" in entry:
        if name not in memory:
            memory[name] = tensors[name].clone()
        return memory[name].view(dtype).as_strided(shape, strides, entry["offset"])
    if name not in memory:
        raw = tensors[name]
        if raw.dtype != dtype:
            raw = raw.clone().view(dtype).reshape(shape)
        memory[name] = torch.empty_strided(shape, strides, dtype=dtype).copy_(raw)
    return memory[name].detach()


def _overlapping(leaves: list[Leaf]) -> list[list[Leaf]]:
    """Return groups of leaves whose memory overlaps, most of them alone, in the order of their first members."""
    groups = [[leaf] for leaf in leaves if leaf.start == leaf.end]
    end, device = 0, None
    full = [leaf for leaf in leaves if leaf.start != leaf.end]
    for leaf in sorted(full, key=lambda leaf: (str(leaf.tensor.device), leaf.start)):
        if leaf.tensor.device == device and leaf.start < end:
            groups[-1].append(leaf)
            end = max(end, leaf.end)
        else:
            groups.append([leaf])
            end, device = leaf.end, leaf.tensor.device
    index = {id(leaf): number for number, leaf in enumerate(leaves)}
    for group in groups:
        if len(group) > 1:
            group.sort(key=lambda leaf: index[id(leaf)])
    return sorted(groups, key=lambda group: index[id(group[0])])


def _free_name(path: str, taken: Mapping[str, object]) -> str:
    """Return `path`, made unique; safetensors keeps one name for itself and wants valid UTF-8."""
    path = path.encode("utf-8", "backslashreplace").decode()
    name, number = path, 1
    while name in taken or name == "__metadata__":
        number += 1
        name = f"{path}~{number}"
    return name


def _plain_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a fresh tensor of `shape`."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory without gap or overlap, in whatever order."""
    step = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != step and tensor.numel():
            return False
        step *= size
    return True


def _plain_copy(tensor: Tensor) -> Tensor:
    copy = tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
    return copy if copy.dtype in _NAMED else copy.reshape(-1).view(torch.uint8)


def _stretch_copy(members: list[Leaf]) -> Tensor:
    """Copy the stretch of memory that `members` lie in; gaps between them become zeros."""
    start = min(leaf.start for leaf in members) // _ALIGN_BYTES * _ALIGN_BYTES
    length = -(-(max(leaf.end for leaf in members) - start) // _ALIGN_BYTES) * _ALIGN_BYTES
    stretch = torch.zeros(length, dtype=torch.uint8)
    for leaf in members:
        tensor = leaf.tensor
        offset = (leaf.start - start) // tensor.element_size()
        leaf.entry["offset"] = offset
        leaf.entry["strides"] = list(tensor.stride())
        target = stretch.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), offset)
        _once(target).copy_(_once(tensor))
    return stretch


def _once(tensor: Tensor) -> Tensor:
    """Return `tensor` without the repetitions of expanded dimensions: nothing may be written twice."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
