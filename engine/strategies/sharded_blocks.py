"""Chooses the submodules that are sharded and gathered as units of their own in sharded training."""

from collections import Counter
from collections.abc import Iterator

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from midstride.engine.modules.torch_internals import parameters_of
from midstride.engine.strategies.torch_internals import NORMALISATION

__all__ = ["blocks", "norms_of", "uncut_tensors"]


def blocks(module: nn.Module) -> list[nn.Module]:
    """Return the units that are gathered on their own: the elements of the outermost lists and sequences of `module`.

    Elements without weights, without a `forward`, or with weights that are shared with others are left out.
    """
    counts = _parameter_counts(module)

    def found(parent: nn.Module, listed: bool) -> Iterator[nn.Module]:
        for child in parent.children():
            if isinstance(child, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
                yield from found(child, True)
            elif listed and _is_block(child, counts):
                yield child
            else:
                yield from found(child, False)

    return list(found(module, False))


def _is_block(submodule: nn.Module, counts: Counter[int]) -> bool:
    own = _parameter_counts(submodule)
    can_be_called = type(submodule).forward is not nn.Module.forward
    return bool(own) and can_be_called and all(counts[weight] == count for weight, count in own.items())


def _parameter_counts(module: nn.Module) -> Counter[int]:
    """Return how often each parameter occurs in `module`, by id."""
    every = module.named_modules(remove_duplicate=False)
    return Counter(id(p) for _, submodule in every for p in parameters_of(submodule).values() if p is not None)


def norms_of(module: nn.Module) -> dict[nn.Module, None]:
    """Return the normalisation layers with weights of their own, in order, as the keys of a dict."""
    counts = _parameter_counts(module)
    return {norm: None for norm in module.modules() if isinstance(norm, NORMALISATION) and _is_block(norm, counts)}


def uncut_tensors(module: nn.Module) -> list[Tensor]:
    """Return the weights and buffers of `module` outside of submodules that are sharded already."""
    cut = [submodule for submodule in module.modules() if isinstance(submodule, FSDPModule)]
    done = {id(tensor) for submodule in cut for tensor in (*submodule.parameters(), *submodule.buffers())}
    return [tensor for tensor in (*module.parameters(), *module.buffers()) if id(tensor) not in done]
