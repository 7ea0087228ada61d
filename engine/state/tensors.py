"""Copies tensors for a file, and rebuilds them with their strides and shared memory.

safetensors files hold contiguous, separate tensors. A tensor that is dense and shares its memory with no other is
written as it is, with its strides in the document. Tensors that overlap (tied weights, views of one buffer, expanded
tensors) are written once: as one tensor if they are all the same view, else as the range of bytes that contains them,
of which they become views again.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from midstride.engine.state.bounds import check_view, sizes
from midstride.engine.state.dtypes import torch_dtype
from midstride.engine.state.torch_internals import foreach_copy

__all__ = [
    "DTYPES",
    "FreshTensors",
    "Layout",
    "Leaves",
    "TensorEntry",
    "TensorRegion",
    "columns_of",
    "copy_tensors",
    "form_of",
    "is_expanded",
    "is_freed",
    "once",
    "other_kind",
    "rebuild",
    "stage",
]

_ALIGN_BYTES = 16  # no element is larger
#: tensors whose facts are read together
_TENSORS_AT_ONCE = 256


#: dtype -> its name in a safetensors file; tensors of other dtypes are written as bytes
_NAMES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.bool: "BOOL"},
    **{torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.complex64: "C64"},
}
#: name in a safetensors file -> dtype
DTYPES = {name: dtype for dtype, name in _NAMES.items()}


class FreshTensors(dict[str, Tensor]):
    """New tensors by name. `rebuild` removes each and uses its memory without a copy."""


@dataclass(slots=True)
class TensorEntry:
    """Facts on a tensor found in a tree.

    Args:
        path: where it was found.
        entry: its entry in the document; `Layout.complete` adds where its bytes are.
        form: all but the address of its memory that its entry depends on, as `form_of` returns it.
        start: address of its memory.
    """

    path: str
    entry: dict[str, Any]
    form: tuple[Any, ...]
    start: int


@dataclass(slots=True)
class Leaves:
    """The tensors found in a tree, and an entry for each; they may require gradients.

    Args:
        entries: an entry for each of `tensors`.
        tensors: as they were found.
        runs: number of the first leaf -> entries of an earlier encoding that are here as they were.
    """

    entries: list[TensorEntry] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    runs: dict[int, list[TensorEntry]] = field(default_factory=dict)

    def add(self, path: str, tensor: Tensor, entry: dict[str, Any]) -> None:
        """Add a tensor that was found at `path`, with its entry in the document."""
        self.entries.append(TensorEntry(path, entry, form_of(tensor), tensor.data_ptr()))
        self.tensors.append(tensor)

    def extend(self, entries: list[TensorEntry], tensors: list[Tensor]) -> None:
        """Add tensors that have entries already."""
        self.runs[len(self.entries)] = entries
        self.entries += entries
        self.tensors += tensors

    def since(self, start: int) -> "Leaves":
        """Return the leaves from number `start` on."""
        return Leaves(self.entries[start:], self.tensors[start:])

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor with its path."""
        return ((entry.path, tensor) for entry, tensor in zip(self.entries, self.tensors, strict=True))


def form_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return all but the address that the entry of a strided tensor in a document depends on."""
    return (
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.device,
        tensor.layout,
        type(tensor),
        tensor.requires_grad,
        tensor.grad_fn is None,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def columns_of(tensors: Sequence[Tensor]) -> list[tuple[list[Any], ...]]:
    """Return addresses and forms of many tensors as lists, one for each fact, in little time.

    All facts of some tensors follow each other, while these are in the processor's cache.

    Raises:
        RuntimeError: a tensor has no strides or no address, as a sparse one.
    """
    return [_columns(tensors[start : start + _TENSORS_AT_ONCE]) for start in range(0, len(tensors), _TENSORS_AT_ONCE)]


def _columns(tensors: Sequence[Tensor]) -> tuple[list[Any], ...]:
    dtypes, requires_grad = [tensor.dtype for tensor in tensors], [tensor.requires_grad for tensor in tensors]
    complex_ones = tensors if any(dtype.is_complex for dtype in {*dtypes}) else ()  # no others can be conjugate
    computed = tensors if True in requires_grad else ()  # no others have a grad_fn
    return (
        [tensor.data_ptr() for tensor in tensors],
        [tensor.shape for tensor in tensors],
        [tensor.stride() for tensor in tensors],
        dtypes,
        [tensor.device for tensor in tensors],
        [type(tensor) for tensor in tensors],
        requires_grad,
        [tensor.grad_fn is None for tensor in computed],
        [tensor.is_conj() for tensor in complex_ones],
        [tensor.is_neg() for tensor in tensors],
    )


class TensorRegion:
    """Bytes of one tensor of a file: a leaf, or a range of memory shared by leaves.

    Args:
        name: name in the file.
        members: numbers of the leaves.
        spans: memory of these leaves.
    """

    def __init__(self, name: str, members: Sequence[int], spans: "Sequence[_Span]") -> None:
        first = spans[0]
        self.name, self.members = name, list(members)
        self.is_stretch = not (first.is_dense and all(first.is_same_view(span) for span in spans[1:]))
        self.offsets: list[int] = []  # where the members start in a stretch, in their elements
        if self.is_stretch:
            start = min(span.start for span in spans) // _ALIGN_BYTES * _ALIGN_BYTES
            self.nbytes = -(-(max(span.end for span in spans) - start) // _ALIGN_BYTES) * _ALIGN_BYTES
            self.align, self.kind, self.shape = _ALIGN_BYTES, "U8", [self.nbytes]
            self.offsets = [(span.start - start) // span.itemsize for span in spans]
        else:
            self.nbytes, self.align = first.nbytes, first.itemsize
            self.kind = _NAMES.get(first.dtype, "U8")
            self.shape = list(first.shape) if first.dtype in _NAMES else [self.nbytes]

    def views(self, memory: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the views of `memory` (uint8, of this size) that receive copies of `sources`."""
        if not self.is_stretch:
            first = tensors[self.members[0]]
            return [memory.view(first.dtype).view(first.shape)]
        views = []
        for number, offset in zip(self.members, self.offsets, strict=True):
            tensor = tensors[number]
            typed = memory.view(tensor.dtype)
            views.append(typed.as_strided(tensor.shape, tensor.stride(), typed.storage_offset() + offset))
        return [once(view) for view in views]

    @property
    def sources(self) -> list[int]:
        """The numbers of the leaves to copy: one of all leaves that are the same view."""
        return self.members if self.is_stretch else self.members[:1]


class Layout:
    """Mapping from a tree's tensors to a file's, reused for later snapshots if it fits."""

    def __init__(self, leaves: Leaves) -> None:
        #: entries and runs of the leaves that were last completed
        self._entries: list[TensorEntry] = []
        self._runs: dict[int, list[TensorEntry]] = {}
        self._starts = np.zeros(len(leaves.entries), np.int64)
        spans = [_Span(tensor) for tensor in leaves.tensors]
        lengths = [span.end - span.start for span in spans]
        self._notes: list[dict[str, Any]] = [{} for _ in spans]
        region_of = [0] * len(spans)
        self.regions: list[TensorRegion] = []
        taken: set[str] = set()
        for members in _overlapping(spans):
            name = _free_name(leaves.entries[members[0]].path, taken)
            taken.add(name)
            region = TensorRegion(name, members, [spans[number] for number in members])
            self.regions.append(region)
            for number in members:
                self._notes[number] = _note(region, number, spans[number])
                region_of[number] = len(self.regions) - 1
        #: numbers of the leaves that have bytes, with the lengths and the regions of these
        self._full = np.flatnonzero(lengths)
        self._sizes, self._regions = np.array(lengths, np.int64)[self._full], np.array(region_of)[self._full]
        #: numbers of the leaves that share memory with others
        sharing = [number for region in self.regions if len(region.members) > 1 for number in region.members]
        self._sharing = np.array(sharing, np.intp)
        self.complete(leaves)

    def fits(self, leaves: Leaves) -> bool:
        """Return True if `leaves` have the paths, layouts and shared memory of this layout's."""
        if len(leaves.entries) != len(self._entries):
            return False
        moved: dict[int, int] = {}
        for number in self._outside_runs(leaves):
            entry, before = leaves.entries[number], self._entries[number]
            if entry.path != before.path or entry.form != before.form:
                return False
            if entry.start != before.start:
                moved[number] = entry.start
        if not moved:
            return True
        starts = self._starts.copy()
        starts[[*moved]] = [*moved.values()]
        return self._shares_alike(starts) and not self._overlaps_anew(starts)

    def _outside_runs(self, leaves: Leaves) -> list[int]:
        """Return the numbers of the leaves in no run that was in the same place before."""
        new, start = list[int](), 0
        for first, entries in leaves.runs.items():
            if self._runs.get(first) is entries:
                new += range(start, first)
                start = first + len(entries)
        return [*new, *range(start, len(leaves.entries))]

    def _shares_alike(self, starts: "np.ndarray[Any, Any]") -> bool:
        """Return True if leaves with shared memory have the same addresses."""
        return np.array_equal(starts[self._sharing], self._starts[self._sharing])

    def _overlaps_anew(self, starts: "np.ndarray[Any, Any]") -> bool:
        """Return whether leaves of different regions share memory, as new tensors may do."""
        begins = starts[self._full]
        order = np.argsort(begins, kind="stable")
        ends = np.maximum.accumulate((begins + self._sizes)[order])
        return bool(((begins[order][1:] < ends[:-1]) & (np.diff(self._regions[order]) != 0)).any())

    def complete(self, leaves: Leaves) -> None:
        """Write into new entries where the bytes of their leaves are."""
        for number in self._outside_runs(leaves):
            leaf = leaves.entries[number]
            self._starts[number] = leaf.start
            if "name" not in leaf.entry:  # an old one may be being written
                leaf.entry.update(self._notes[number])
        self._entries, self._runs = leaves.entries, leaves.runs


def is_freed(tensor: Tensor) -> bool:
    """Return True if the memory of `tensor` is freed, as of gathered weights when sharded."""
    has_memory = tensor.layout == torch.strided and (tensor.is_cpu or tensor.is_cuda) and tensor.numel() > 0
    return has_memory and not tensor.untyped_storage().nbytes()


def is_expanded(tensor: Tensor) -> bool:
    """Return whether elements of `tensor` share memory (strides of 0), as after `expand`."""
    if tensor.layout != torch.strided:
        return False
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def other_kind(tensor: Tensor) -> str | None:
    """Return the kind of a tensor that no file can hold, such as nested; None for other tensors."""
    if tensor.is_quantized or tensor.is_nested or tensor.is_meta:
        return "quantised" if tensor.is_quantized else "nested" if tensor.is_nested else "meta"
    if tensor.layout not in (torch.strided, torch.sparse_coo):
        return str(tensor.layout).removeprefix("torch.")
    return "freed" if is_freed(tensor) else None


def stage(leaves: Leaves) -> dict[str, Tensor]:
    """Copy all `leaves` to new CPU memory and complete their entries. Return the copies by name."""
    if not leaves.tensors:  # as in most states of loaders, which may be taken after each batch
        return {}
    layout = Layout(leaves)
    staged = {}
    for region in layout.regions:
        memory = torch.zeros(region.nbytes, dtype=torch.uint8)
        sources = [leaves.tensors[number] for number in region.sources]
        copy_tensors(region.views(memory, leaves.tensors), [once(source) for source in sources])
        kind = next((dtype for dtype, name in _NAMES.items() if name == region.kind))
        staged[region.name] = memory.view(kind).view(region.shape)
    return staged


@torch.no_grad()
def copy_tensors(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each of `sources` to one of `targets` on the CPU. On return, sources can change."""
    if targets:
        foreach_copy(targets, sources)
    for device in {source.device for source in sources if source.is_cuda}:
        torch.cuda.synchronize(device)


def rebuild(entry: Mapping[str, Any], tensors: Mapping[str, Tensor], memory: dict[str, Tensor]) -> Tensor:
    """Return the tensor that an entry describes, in new memory.

    Args:
        entry: completed by `stage`; an entry from elsewhere cannot reach memory beyond `tensors`.
        tensors: what `stage` returned, which the result does not share; or `FreshTensors`, which are consumed.
        memory: name -> memory rebuilt before, so that tensors that shared memory share it again.

    Raises:
        ValueError: the entry and the tensor in the file do not go together.
    """
    name, dtype, shape = entry["name"], torch_dtype(entry["dtype"]), sizes(entry["shape"])
    strides = sizes(entry["strides"]) if entry.get("strides") else _plain_strides(shape)
    if name not in memory and "offset" in entry:
        memory[name] = _flat(tensors, name)
    elif name not in memory:
        memory[name] = _as_strided(_flat(tensors, name).view(dtype), shape, strides)
    if "offset" in entry:
        typed = memory[name].view(dtype)
        check_view(typed.numel(), dtype.itemsize, shape, strides, entry["offset"])
        found = typed.as_strided(shape, strides, entry["offset"])
    else:
        found = memory[name].detach()
    if dtype == torch.bool and found.numel() and int(found.view(torch.uint8).amax()) > 1:
        raise ValueError(f"tensor {name} of booleans holds bytes other than 0 and 1")
    return found


def _flat(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """Return the bytes of a tensor, in memory that the result may use."""
    tensor = tensors.pop(name) if isinstance(tensors, FreshTensors) else tensors[name].clone()
    return tensor.reshape(-1).view(torch.uint8)


def _as_strided(flat: Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """Return a tensor with the elements of `flat`, of that shape and those strides."""
    plain = flat.view(shape)
    if strides == _plain_strides(shape):
        return plain
    target = torch.empty(flat.shape, dtype=flat.dtype)
    check_view(target.numel(), target.itemsize, shape, strides)
    arranged = target.as_strided(shape, strides)
    if not _is_dense(arranged):
        raise ValueError(f"strides {strides} for a tensor {shape} that shares its memory with no other")
    return arranged.copy_(plain)


class _Span:
    """The range of memory of one tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype, self.shape, self.strides = tensor.dtype, tensor.shape, tensor.stride()
        self.device, self.itemsize, self.nbytes = tensor.device, tensor.element_size(), tensor.nbytes
        self.start = self.end = tensor.data_ptr()
        self.is_plain = self.strides == _plain_strides(self.shape)
        self.is_dense = self.is_plain or _is_dense(tensor)
        if tensor.numel():
            self.end += (1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))) * self.itemsize

    def is_same_view(self, other: "_Span") -> bool:
        """Return whether both are the same view of the same memory."""
        mine, its = (self.start, self.dtype, self.shape, self.strides), (other.start, other.dtype, other.shape)
        return mine == (*its, other.strides)


def _overlapping(spans: Sequence[_Span]) -> list[list[int]]:
    """Return groups of spans with overlapping memory, in the order of their first members."""
    groups = [[number] for number, span in enumerate(spans) if span.start == span.end]
    full = [number for number, span in enumerate(spans) if span.start != span.end]
    end, device = 0, None
    for number in sorted(full, key=lambda number: (str(spans[number].device), spans[number].start)):
        span = spans[number]
        if span.device == device and span.start < end:
            groups[-1].append(number)
            end = max(end, span.end)
        else:
            groups.append([number])
            end, device = span.end, span.device
    return sorted(sorted(group) for group in groups)


def _note(region: TensorRegion, number: int, span: _Span) -> dict[str, Any]:
    """Return the items of a leaf's entry that tell where its bytes are."""
    note: dict[str, Any] = {"name": region.name}
    if region.is_stretch:
        note["offset"] = region.offsets[region.members.index(number)]
    if region.is_stretch or not span.is_plain:
        note["strides"] = list(span.strides)
    return note


def _free_name(path: str, taken: Container[str]) -> str:
    """Return `path`, made unique; safetensors keeps one name for itself and wants valid UTF-8."""
    path = path.encode("utf-8", "backslashreplace").decode()
    name, number = path, 1
    while name in taken or name == "__metadata__":
        number += 1
        name = f"{path}~{number}"
    return name


def _plain_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of `shape`."""
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


def once(tensor: Tensor) -> Tensor:
    """Return `tensor` with expanded dimensions of size 1, so that no element is written twice."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
