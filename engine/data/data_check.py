"""Finds map-style data that differ between ranks or attempts, by a few samples.

At the start of an attempt the first and last samples of the epoch are read, beside the batches, and ranks compare
their digests. Ranks of loaders that divide the samples themselves compare their first batches, which should differ.
Snapshots hold the digest of the samples that the first attempt read there, until training changes the data; a resumed
attempt reads the same samples again.
"""

import copy
import logging
import platform
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np
import torch

from midstride.engine.data.attribute_fingerprint import AttributeFingerprint
from midstride.engine.data.data_owners import DataOwners, Nodes, data_owners
from midstride.engine.data.iterable.content_digest import content_digest
from midstride.engine.data.order import BatchRequest
from midstride.engine.errors import NotExact
from midstride.engine.formatting import format_names
from midstride.engine.state.differences import differences
from midstride.engine.trees import named_leaves

__all__ = ["SAMPLES", "CheckedSamples", "DataCheck", "DataDigests", "SampleCheck", "ensure_same_data", "samples_digest"]

log = logging.getLogger(__name__)

#: number of samples that are compared
SAMPLES = 4
_CAUSES = (
    "The usual causes are a draw without a seed in setup, such as a random split or a tokenizer that is trained there, "
    "and the order of a set or of os.listdir. Draw with a seed, sort, or keep the result in a file"
)
_DATA_OF_RANKS = "{where} has different samples at the same indices on different ranks. " + _CAUSES + "."
_DATA_OF_ATTEMPTS = (
    "{where} has other samples at the same indices than when the run began. " + _CAUSES + ". Files and databases that "
    "training writes are in no snapshot: keep their values in an attribute of the data set. To continue with these "
    "data: --accept-change samples (accept_change='samples' in a script)."
)


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
        shared: digest of some samples of the epoch, the same on all ranks; None if they are unknown or changed.
        where: name of the loader.
        machine: kind of CPU and versions, with which the last bits of a sample may change.
        own: reader and digest of the first batch, where each rank reads by itself; None elsewhere.
    """

    saved: int | None
    again: int | None
    shared: int | None
    where: str
    machine: str
    own: tuple[int, int] | None = None

    @classmethod
    def of_rank(cls, where: str, reader: int, digest: int) -> "DataDigests":
        """Return the digest of the first batch of a loader that divides the samples itself.

        Args:
            where: name of the loader.
            reader: number that ranks have in common if they are meant to read the same samples.
            digest: digest of the samples.
        """
        return cls(None, None, None, where, "", (reader, digest))


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
        self._is_loaded = False  #: whether the state is still that which was loaded: no pass has begun since
        self.is_asked = False  #: whether an answer is due
        self._is_first = False
        self.found: DataDigests | None = None  #: set once by `answered`, and taken by `take`

    def request(self, opening_of: Callable[[], BatchRequest | None], *, is_first: bool) -> SampleCheck | None:
        """Return the samples to read at the start of this attempt's first pass; None later.

        Args:
            opening_of: returns a request for some samples of the epoch, or None.
            is_first: whether it is the first pass of the run, from its first batch on.
        """
        if self._has_begun:
            return None
        self._has_begun, self._is_first, self._is_loaded = True, is_first, False
        if self._has_changed() and not is_first:  # training, on this rank perhaps, had changed them: it was restored
            self._saved, self.found = None, DataDigests(None, None, None, self._where, _machine())
            return None
        if self._saved is not None and self._saved["machine"] != _machine():
            self._saved = None
        saved = None if self._saved is None else BatchRequest(*self._saved["samples"])
        if (opening := opening_of()) is not None:
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
        if self._saved is not None and not self._is_loaded and self._has_changed():
            self._saved = None
        return {} if self._saved is None else {"checked": self._saved}

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Restore the result of `state_dict`."""
        self._saved, self._is_loaded = state_dict.get("checked"), True


def ensure_same_data(everyone: Sequence[Sequence[DataDigests]], *, accepts_change: bool, warns: bool) -> bool:
    """Refuse data that differ between ranks or attempts.

    Args:
        everyone: digests of all loaders, by rank.
        accepts_change: whether data may differ from those of an earlier attempt.
        warns: whether this rank warns if ranks read the same samples by themselves.

    Returns:
        Whether a difference to an earlier attempt was accepted.

    Raises:
        NotExact: the data differ.
    """
    accepted = False
    for found in zip(*everyone, strict=False):
        where = found[0].where
        if warns:
            _warn_of_same(where, [one.own for one in found if one.own is not None])
        alike = [one for one in found if one.machine == found[0].machine]
        if len({one.shared for one in alike if one.shared is not None}) > 1:
            raise NotExact(_DATA_OF_RANKS.format(where=where))
        if any(one.saved != one.again for one in found):
            if not accepts_change:
                raise NotExact(_DATA_OF_ATTEMPTS.format(where=where))
            accepted = True
    return accepted


def _warn_of_same(where: str, own: Sequence[tuple[int, int]]) -> None:
    """Warn if ranks that should read different samples have read the same."""
    readers = Counter(digest for _, digest in {*own})
    if alike := [str(rank) for rank, (_, digest) in enumerate(own) if readers[digest] > 1]:
        log.warning(
            "%s gives ranks %s the same first batch as another rank. Divide the samples by rank and size, which "
            "midstride.engine.World.from_environment() has. If each rank should read all samples, set "
            "use_distributed_sampler=False",
            where,
            format_names(alike, 8),
        )


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
