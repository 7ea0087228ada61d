"""Finds layers and tensors that strategies over several processes do not support."""

import torch
from torch import nn

__all__ = ["max_norm_errors", "sparse_layers", "sparse_tensor_errors"]

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def sparse_layers(module: nn.Module) -> list[str]:
    """Return names of layers with sparse gradients, which flat buffers cannot hold."""
    return [name for name, layer in module.named_modules() if isinstance(layer, _EMBEDDINGS) and layer.sparse]


def max_norm_errors(module: nn.Module) -> list[str]:
    """Return messages on embeddings with `max_norm`, whose forward pass changes weights."""
    return [
        f"the module's {name} is an embedding with max_norm: each process, or lane, would scale the rows of its own "
        "batch in shared weights. Remove max_norm, and scale the result of the embedding"
        for name, layer in module.named_modules()
        if isinstance(layer, _EMBEDDINGS) and layer.max_norm is not None
    ]


def sparse_tensor_errors(module: nn.Module) -> list[str]:
    """Return messages on parameters and buffers of `module` that are sparse tensors."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return [
        f"the module's {name} is a sparse tensor, and processes, or lanes, exchange dense ones: make it dense, or keep "
        "it in a plain attribute, which is separate in each process"
        for name, tensor in named
        if tensor.layout != torch.strided
    ]
