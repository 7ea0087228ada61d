"""Digests of the content of tensors, on any device and in any layout."""

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor

from midstride.engine.state.tensors import is_freed
from midstride.engine.state.torch_internals import indices_and_values

__all__ = ["tensor_digest"]

#: bytes of GPU memory that are copied to the host at a time
_CHUNK_BYTES = 1 << 24
_tensor: Any = Tensor
#: sparse layouts with compressed rows or columns
_ROWS, _COLUMNS = (torch.sparse_csr, torch.sparse_bsr), (torch.sparse_csc, torch.sparse_bsc)


def tensor_digest(tensor: Tensor, sample_bytes: int | None = None) -> str:
    """Return a digest of the type, shape and content of a tensor.

    Content that cannot be read is left out: of tensors on "meta", freed ones, and wrappers of other tensors.

    Args:
        tensor: on any device, of any layout.
        sample_bytes: number of bytes to read, of elements spread over the tensor, if it is more than four times as
            large; a smaller one is read as a whole, which takes no longer. None reads all.

    >>> tensor_digest(torch.eye(2).to_sparse()) == tensor_digest(2 * torch.eye(2).to_sparse())
    False
    """
    if tensor.is_nested:
        inner = [tensor_digest(one, sample_bytes) for one in tensor.unbind()]
        return xxhash.xxh3_128_hexdigest(" ".join(inner).encode())
    digest = xxhash.xxh3_128(f"{tensor.dtype} {list(tensor.shape)}".encode())
    for part in _parts(tensor):
        plain = part.detach().resolve_conj().resolve_neg()
        if sample_bytes is not None and plain.nbytes > 4 * sample_bytes:
            plain = plain.reshape(-1)[:: -(-plain.nbytes // sample_bytes)]
        for stretch in _stretches(plain):
            # An array of it would make it one that cannot be resized.
            digest.update((ctypes.c_char * stretch.nbytes).from_address(stretch.data_ptr()))
    return digest.hexdigest()


def _stretches(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the elements of `tensor` on the host, in parts. Each overwrites the previous one."""
    if not tensor.is_cuda or not tensor.is_contiguous() or tensor.nbytes < _CHUNK_BYTES:
        if tensor.numel():
            yield tensor.cpu().contiguous()
        return
    # To memory that is not pinned a GPU copies at a small part of the speed.
    pinned = torch.empty(_CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
    for chunk in tensor.view(-1).view(torch.uint8).split(_CHUNK_BYTES):
        yield pinned[: len(chunk)].copy_(chunk)


def _parts(tensor: Tensor) -> Sequence[Tensor]:
    """Return the strided tensors of which `tensor` consists."""
    kind: Any = type(tensor)
    if kind.__torch_dispatch__ is not _tensor.__torch_dispatch__ or tensor.is_meta or is_freed(tensor):
        return ()
    if tensor.layout == torch.sparse_coo:
        return indices_and_values(tensor)
    if tensor.layout in _ROWS:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in _COLUMNS:
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,) if tensor.layout == torch.strided else ()
