"""The values of an evaluation, which can be read by name and as Lightning's list."""

import re

__all__ = ["Results"]

_NUMBER = re.compile(r"/dataloader_idx_(\d+)$")


class Results(dict[str, float]):
    """Values by name; `results[0]` has those of the first loader, as in Lightning's list.

    >>> results = Results({"loss/dataloader_idx_0": 1.0, "loss/dataloader_idx_1": 2.0})
    >>> results["loss/dataloader_idx_1"], results[1]
    (2.0, {'loss/dataloader_idx_1': 2.0})
    """

    def __missing__(self, key: object) -> dict[str, float]:
        """Return the values of one loader; those without a loader's number belong to each.

        Raises:
            KeyError: there is no such value.
            IndexError: there is no such loader.
        """
        if type(key) is not int:
            raise KeyError(key)
        found = {name: _NUMBER.search(name) for name in self}
        numbers = [None if match is None else int(match[1]) for match in found.values()]
        loaders = max((number for number in numbers if number is not None), default=0) + 1
        if not -loaders <= key < loaders:
            raise IndexError(f"results[{key}]: there are values of {loaders} loaders")
        wanted = (None, key % loaders)
        return {name: self[name] for name, number in zip(found, numbers, strict=True) if number in wanted}
