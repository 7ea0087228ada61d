"""Finds map-style data that differ between ranks or attempts, by a few samples.

At the start of an attempt the first samples of the epoch are read, beside the batches, and ranks compare their digests.
Snapshots hold the digest of the samples that the first attempt read there, until training changes the data; a resumed
attempt reads the same samples again.
"""

import copy
import platform
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np
import torch

from midstride.engine.data.attribute_fingerprint import AttributeFingerprint
from midstride.engine.data.data_owners import DataOwners, Nodes, data_owners
from midstride.engine.data.iterable.content_digest import content_digest
from midstride.engine.data.order import BatchRequest
from midstride.engine.state.differences import differences
from midstride.engine.trees import named_leaves

__all__ = ["CheckedSamples", "DataCheck", "DataDigests", "SampleCheck", "samples_digest"]

#: number of samples that are compared
SAMPLES = 4


class SampleCheck(NamedTuple):
    """Request for digests of samples outside of batches, answered by `CheckedSamples`.

    Args:
        requests: for each digest, the samples to read.
    """

    requests: tuple[BatchRequest, ...]


class CheckedSamples(NamedTuple):
    """The answer to a `SampleCheck`: the digests."""

    digests: tuple[int, ...]


class DataDigests(NamedTuple):
    """Digests to compare, at the start of an attempt.

    Args:
        saved: digest that an earlier attempt found of some samples; None if there is none.
        again: digest of the same samples now.
        shared: digest of the first samples of the epoch, the same on all ranks; None if they are unknown or changed.
        where: name of the loader.
        machine: kind of CPU and versions, with which the last bits of a sample may change.
    """

    saved: int | None
    again: int | None
    shared: int | None
    where: str
    machine: str


class DataCheck:
    """The check of one loader.

    Args:
        dataset: the user's data set.
        where: name of the loader.
    """

    def __init__(self, dataset: Any, where: str) -> None:
        self._data = DataOwners(dict(data_owners("data set", dataset)))
        self._where = where
        self._opening: BatchRequest | None = None
        #: request and digest of the samples of the first attempt, as plain values; None if training has changed them
        self._saved: dict[str, Any] | None = None
        #: the data as they were built, then at the start of the attempt's first pass
        self._start: Nodes = copy.deepcopy(self._data.nodes())
        self._fingerprint = AttributeFingerprint(self._data.owners())
        self._has_begun = False
        self.is_asked = False  #: whether an answer is due
        self._is_first = False
        self.found: DataDigests | None = None  #: set once by `answered`, and taken by `take`

    def request(self, opening: BatchRequest | None, *, is_first: bool) -> SampleCheck | None:
        """Return the samples to read at the start of this attempt's first pass; None later.

        Args:
            opening: request for the first samples of the epoch, or None.
            is_first: whether it is the first pass of the run, from its first batch on.
        """
        if self._has_begun:
            return None
        self._has_begun, self._is_first = True, is_first
        if self._has_changed() and not is_first:  # training, on this rank perhaps, had changed them: it was restored
            self._saved, self.found = None, DataDigests(None, None, None, self._where, _machine())
            return None
        if self._saved is not None and self._saved["machine"] != _machine():
            self._saved = None
        saved = None if self._saved is None else BatchRequest(*self._saved["samples"])
        if opening is not None:
            opening = opening._replace(indices=opening.indices[:SAMPLES], probe=0)
        self._opening = opening if opening is not None and _is_plain(opening.indices) else None
        wanted = [request for request in (saved, self._opening) if request is not None]
        self.is_asked = bool(wanted)
        return SampleCheck(tuple(wanted)) if wanted else None

    def answered(self, answer: CheckedSamples) -> None:
        """Record the answer to `request`."""
        self.is_asked = False
        digests = iter(answer.digests)
        again = None if self._saved is None else next(digests)
        opening = None if self._opening is None else next(digests)
        expected = None if self._saved is None else self._saved["digest"]
        self.found = DataDigests(expected, again, opening, self._where, _machine())
        if self._is_first and self._opening is not None:
            self._saved = {"samples": [*self._opening], "digest": opening, "machine": _machine()}

    def take(self) -> list[DataDigests]:
        """Return the digests of this attempt, once."""
        found, self.found = self.found, None
        return [] if found is None else [found]

    def accept(self) -> None:
        """Compare no more with the samples of the first attempt."""
        self._saved = None

    def _has_changed(self) -> bool:
        """Return whether the data have changed since the last call, or since they were built."""
        if self._fingerprint.is_same(self._data.owners()):
            return False
        before, self._start = self._start, copy.deepcopy(self._data.nodes())
        self._fingerprint = AttributeFingerprint(self._data.owners())
        return bool(differences(before, self._start))

    def state_dict(self) -> dict[str, Any]:
        """Return request and digest of the first attempt's samples, until training changes data."""
        if self._saved is not None and self._has_changed():
            self._saved = None
        return {} if self._saved is None else {"checked": self._saved}

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Restore the result of `state_dict`."""
        self._saved = state_dict.get("checked")


def samples_digest(samples: list[Any]) -> int:
    """Return a digest of samples, whose text counts only if they hold nothing else.

    Paths may differ between machines.
    """
    leaves = [leaf for _, leaf in named_leaves(samples, "samples")]
    others = [leaf for leaf in leaves if not isinstance(leaf, (str, bytes, type(None), PurePath))]
    return content_digest(others or samples)


def _machine() -> str:
    cpu = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return f"{cpu}, torch {torch.__version__}, numpy {np.__version__}"


def _is_plain(indices: list[Any]) -> bool:
    return {*map(type, indices)} <= {int, str}
