"""Data sets: which hold nothing but attributes, so that these are all of their state."""

from typing import Any

from torch.utils.data import ChainDataset, ConcatDataset, StackDataset, Subset, TensorDataset

from midstride.engine.code_origin import is_user_class
from midstride.engine.objects.attributes import has_slots, made_by

__all__ = ["TORCH_DATA", "is_of_attributes"]

#: torch's own, of which that is known
TORCH_DATA: tuple[type[Any], ...] = (Subset, ConcatDataset, ChainDataset, StackDataset, TensorDataset)


def is_of_attributes(kind: type) -> bool:
    """Return whether objects of `kind` hold nothing but what stands in their `__dict__`, and may be described by it.

    >>> is_of_attributes(Subset), is_of_attributes(list), is_of_attributes(type("Rows", (list,), {}))
    (True, False, False)
    """
    is_known = kind in TORCH_DATA or is_user_class(kind)
    return is_known and made_by(kind) is object and kind.__dictoffset__ != 0 and not has_slots(kind)
