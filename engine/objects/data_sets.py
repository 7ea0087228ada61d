"""Data sets of torch whose attributes are all of their state."""

from typing import Any

from torch.utils.data import ChainDataset, ConcatDataset, StackDataset, Subset, TensorDataset

from midstride.engine.code_origin import is_user_class
from midstride.engine.objects.attributes import made_by

__all__ = ["TORCH_DATA", "is_of_attributes"]

#: classes of torch of which this is known
TORCH_DATA: tuple[type[Any], ...] = (Subset, ConcatDataset, ChainDataset, StackDataset, TensorDataset)


def is_of_attributes(kind: type) -> bool:
    """Return whether all state of objects of `kind` is in their attributes.

    >>> is_of_attributes(Subset), is_of_attributes(list), is_of_attributes(type("Rows", (list,), {}))
    (True, False, False)
    """
    return (kind in TORCH_DATA or is_user_class(kind)) and made_by(kind) is object
