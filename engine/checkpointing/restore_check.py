"""Restore check: finds, at the start of an attempt, state that the next cannot restore.

Before the first step and once after it, every part that depends on user code loads the state that it returned, and has
to return the same state again. Parts that cannot load a state while they are in use are checked on a clone. Tensors are
passed without a copy, so that they keep their memory. The states are compared by a copy, large tensors by a digest.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from midstride.engine.errors import EngineError, NotExact, UnsupportedState, UserCodeError
from midstride.engine.objects.kinds.tensors import tensors_in
from midstride.engine.state.differences import differences
from midstride.engine.state.stateful import Stateful
from midstride.engine.state.tensor_digest import tensor_digest
from midstride.engine.state.tensors import is_freed

__all__ = ["check_restores", "copied_with_digests"]

#: bytes from which on tensors are compared by a digest, which takes a fifth of the time of a copy and a comparison
_LARGE_BYTES = 1 << 20
#: part that depends on user code -> its name in errors, in the order of the restore
CHECKED_PARTS = {
    "strategy": "the strategy",
    "feeds": "the loaders",
    "structure": "the module's structure",
    "module": "the module",
    "optimizers": "the optimizers",
    "schedulers": "the schedulers",
    "callbacks": "the callbacks",
    "metrics": "the metrics",
    "buffers": "the module's buffers",
    "user": "what on_save_checkpoint keeps",
    "objects": "the attributes",
}


def check_restores(parts: Mapping[str, Stateful], when: str) -> None:
    """Load each part's own state into it, and check that its state is the same afterwards.

    Generators are restored.

    Args:
        parts: parts of a run; those in `CHECKED_PARTS` are checked.
        when: time of the check, for the message.

    Raises:
        NotExact: a part did not restore its state.
    """
    drawn = parts["generators"].state_dict()
    objects = parts["objects"].state_dict()
    objects_before = _copied(objects)
    for name in [name for name in CHECKED_PARTS if name in parts]:
        given = objects if name == "objects" else parts[name].state_dict()
        before = objects_before if name == "objects" else _copied(given)
        part = _trial_part(parts[name])
        try:
            part.load_state_dict(_copied(given, lambda tensor: tensor))
        except EngineError:
            raise
        except Exception as error:
            message = _restore_message(CHECKED_PARTS[name], when, f"{type(error).__name__}: {error}")
            raise NotExact(f"{UserCodeError.of('load_state_dict', error)}\n{message}") from error
        if paths := differences(before, _copied(part.state_dict(), _by_digest)):
            raise NotExact(_restore_message(CHECKED_PARTS[name], when, ", ".join(paths[:5])))
    parts["generators"].load_state_dict(drawn)


def _trial_part(part: Stateful) -> Stateful:
    """Return a clone of `part` if it has a method `clone`, else itself."""
    clone: Callable[[], Stateful] | None = getattr(part, "clone", None)
    return part if clone is None else clone()


def _restore_message(name: str, when: str, what: str) -> str:
    return (
        f"{name}, {when}, did not take back the state given: {what}. No later attempt could go on from a snapshot. "
        "What a state_dict returns must be all that load_state_dict needs, bit for bit; or run without snapshots "
        "(snapshots=None)."
    )


def _on_host(tensor: Tensor) -> Tensor | str:
    """Return a copy of `tensor` on the CPU; for large tensors, the text of `_by_digest`."""
    if is_freed(tensor):
        raise UnsupportedState(
            f"a weight of {list(tensor.shape)} that a step has gathered and the strategy has freed since is held by an "
            "attribute or a state: no snapshot can hold it. Keep a clone of it instead"
        )
    if isinstance(digest := _by_digest(tensor), str):
        return digest
    copied = tensor.detach().clone() if tensor.device.type == "cpu" else tensor.detach().cpu()
    return nn.Parameter(copied, tensor.requires_grad) if type(tensor) is nn.Parameter else copied


def _by_digest(tensor: Tensor) -> Tensor | str:
    """Return dtype, shape and digest of a large tensor as text; other tensors unchanged.

    Large: on the CPU or a GPU only.
    """
    is_plain = tensor.device.type in ("cpu", "cuda") and tensor.layout == torch.strided and not tensor.is_quantized
    if not is_plain or type(tensor) not in (Tensor, nn.Parameter) or tensor.nbytes < _LARGE_BYTES:
        return tensor
    return f"{tensor.dtype} {list(tensor.shape)} {tensor_digest(tensor)}"


def copied_with_digests(tree: Any) -> Any:
    """Return a copy of `tree` on the host, with the digests of large tensors in their place."""
    return _copied(tree)


def _copied(tree: Any, tensor: Callable[[Tensor], Tensor | str] = _on_host) -> Any:
    """Return a copy of `tree` whose tensors are replaced by the results of `tensor`."""
    return copy.deepcopy(tree, {id(found): tensor(found) for found in tensors_in(tree)})
