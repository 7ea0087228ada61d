"""The return value of `Trainer.predict`, for one or several loaders, on one or several ranks."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

__all__ = ["join_ranks", "of_loaders"]


class LoaderPredictions(list[Any]):
    """The predictions of one loader, where there are several."""


def of_loaders(predictions: Sequence[list[Any]]) -> list[Any]:
    """Return a list of predictions for each loader; of a single loader, its predictions themselves."""
    return predictions[0] if len(predictions) == 1 else [LoaderPredictions(one) for one in predictions]


def join_ranks(ranks: Sequence[list[Any]]) -> list[Any]:
    """Return the predictions of all ranks, concatenated in the order of ranks for each loader.

    >>> join_ranks([of_loaders([["a", "b"]]), of_loaders([["c"]])])
    ['a', 'b', 'c']
    >>> join_ranks([of_loaders([["a"], ["x"]]), of_loaders([["b"], ["y", "z"]])])
    [['a', 'b'], ['x', 'y', 'z']]
    """
    if any(isinstance(one, LoaderPredictions) for one in ranks[0]):
        return [LoaderPredictions(chain.from_iterable(loader)) for loader in zip(*ranks, strict=True)]
    return list(chain.from_iterable(ranks))
