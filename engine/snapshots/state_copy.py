"""Copies of state: a rank's state in memory that is written while training continues.

A copy is a whole safetensors file in a buffer: eight bytes with the length of the header, the header, the tensors. As
long as tensors keep their names, forms and addresses, the layout stays, and a snapshot is one copy of each tensor.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from midstride.engine.processes.preload import collector_paused
from midstride.engine.snapshots.buffer_pool import Buffer
from midstride.engine.snapshots.position import rank_stem
from midstride.engine.state.codec import encode_lazily
from midstride.engine.state.tensor_blocks import TensorBlocks
from midstride.engine.state.tensor_header import ELEMENT_BYTES, tensor_header
from midstride.engine.state.tensors import Layout, TensorRegion, copy_tensors, once
from midstride.engine.storage.checksums import BLOCK_BYTES, FileDigest, digest_of
from midstride.engine.world import World

__all__ = ["StateCopier", "StateCopy", "assign_ranks"]

#: no element is wider
_WIDEST_BYTES = 16


@dataclass(frozen=True)
class StateCopy:
    """One rank's part of a snapshot, in memory.

    Args:
        document: the tree without its tensors, as JSON values.
        stored_by_rank: stem of another rank's files -> names of the tensors of this tree that it writes.
        shared: digest of the list of replicated tensors; every rank must hold the same.
        data: the safetensors file of this rank, bytes of a buffer.
    """

    document: Any
    stored_by_rank: dict[str, list[str]]
    shared: FileDigest
    data: memoryview


class StateCopier:
    """Copies trees into buffers, and remembers the layout of the last one.

    Args:
        world: this process among the others.
        replicated: whether the tensor of a name is the same on every rank, and so is written once.
    """

    def __init__(self, world: World, replicated: Callable[[str], bool]) -> None:
        self._world, self._replicated = world, replicated
        self._plan: _Plan | None = None
        self._blocks = TensorBlocks()

    def copy(self, tree: object, buffer: Buffer) -> StateCopy:
        """Copy `tree`; when this returns, it may change.

        Raises:
            UnsupportedState: it holds values that cannot be written.
        """
        with collector_paused():
            return self._copy(tree, buffer)

    def _copy(self, tree: object, buffer: Buffer) -> StateCopy:
        document, leaves = encode_lazily(tree, self._blocks)
        if self._plan is None or not self._plan.layout.fits(leaves):
            if self._plan is not None:  # entries of the last snapshot tell where its tensors are
                self._blocks.clear()
                document, leaves = encode_lazily(tree, self._blocks)
            self._plan = _Plan(Layout(leaves), self._world, self._replicated)
        plan = self._plan
        plan.layout.complete(leaves)
        return StateCopy(document, plan.stored_by_rank, plan.shared, plan.copy(leaves.tensors, buffer))


class _Plan:
    """Tensors that this rank writes, and their places in its file."""

    def __init__(self, layout: Layout, world: World, replicated: Callable[[str], bool]) -> None:
        self.layout = layout
        shared = {region.name: region.nbytes for region in layout.regions if replicated(region.name)}
        assigned = assign_ranks(shared, world.size)
        self.shared = digest_of([json.dumps(sorted(shared.items())).encode()])
        self.stored_by_rank: dict[str, list[str]] = {}
        mine: list[TensorRegion] = []
        for region in layout.regions:
            rank = assigned.get(region.name, world.rank)
            if rank == world.rank:
                mine.append(region)
            else:
                self.stored_by_rank.setdefault(rank_stem(rank, world.size), []).append(region.name)
        # The widest elements first: then each tensor stands at a multiple of its own width, without gaps. A rank that
        # needs some rows reads whole blocks, so tensors of whole blocks come first, from the start of a block on. Those
        # smaller than a block come last, side by side.
        self._mine = sorted(
            mine, key=lambda region: (_is_small(region), not _has_whole_blocks(region), -region.align, region.name)
        )
        #: numbers of the leaves to copy, in the order of the file, and whether each is in a stretch
        self._sources = [(number, region.is_stretch) for region in self._mine for number in region.sources]
        start_bytes = BLOCK_BYTES if any(map(_has_whole_blocks, self._mine)) else ELEMENT_BYTES
        self._header = tensor_header({one.name: (one.kind, one.shape, one.nbytes) for one in self._mine}, start_bytes)
        self._size = len(self._header) + sum(region.nbytes for region in self._mine)
        self._views: dict[int, list[Tensor]] = {}  # first address of a buffer -> where in it each copy goes

    def copy(self, tensors: Sequence[Tensor], buffer: Buffer) -> memoryview:
        """Copy this rank's share of `tensors` into `buffer`; return the resulting file."""
        memory = buffer.reserve(self._size)
        if memory.data_ptr() not in self._views:
            self._views[memory.data_ptr()] = self._prepare(memory, tensors)
        sources = [once(tensors[n]) if is_stretch else tensors[n] for n, is_stretch in self._sources]
        copy_tensors(self._views[memory.data_ptr()], sources)
        return memory.numpy().data

    def _prepare(self, memory: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Write the constant part of `memory`: the header, and zeros in gaps of shared memory."""
        header, rest = memory[: len(self._header)].numpy(), memory[len(self._header) :]
        header[:] = memoryview(self._header)
        views, start = [], 0
        for region in self._mine:
            own = rest[start : start + region.nbytes]
            if region.is_stretch:
                own.zero_()
            views += region.views(own, tensors)
            start += region.nbytes
        return views


def _is_small(region: TensorRegion) -> bool:
    return region.nbytes < BLOCK_BYTES or region.nbytes % _WIDEST_BYTES > 0


def _has_whole_blocks(region: TensorRegion) -> bool:
    return region.nbytes > 0 and region.nbytes % BLOCK_BYTES == 0


def assign_ranks(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Return the writing rank of each replicated tensor: largest first, to the least loaded.

    >>> assign_ranks({"a": 3, "b": 2, "c": 2}, 2)
    {'a': 0, 'b': 1, 'c': 1}
    """
    load = [0] * ranks
    assigned = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rank = load.index(min(load))
        load[rank] += sizes[name]
        assigned[name] = rank
    return assigned
