"""A key-value store of the ranks of one machine, in a file that only their user can open.

torch's `FileStore` keeps all values that were ever written. This one keeps the last value of each key, so it is the one
for values that change all the time.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from midstride.engine.session.private_file import AnonymousFile
from midstride.engine.strategies.torch_internals import Store

__all__ = ["SharedValues"]

_KEY = "values"
_POLL_S = 0.01
#: seconds after which a rank that sets a value is frozen, or was killed
_WRITTEN_S = 5.0
_DECODER = json.JSONDecoder()
#: seconds in which a value must be set by another rank
_WAITED = timedelta(minutes=5)


class SharedValues:
    """Methods of a `torch.distributed.Store` that the engine uses.

    One thread at a time uses an instance.

    Args:
        file: that holds the values.
    """

    def __init__(self, file: AnonymousFile) -> None:
        self._file = file

    @classmethod
    def of_ranks(cls, store: Store, *, is_first: bool) -> "SharedValues":
        """Return new values shared by the ranks.

        Every rank calls this with the same unused private `store`.

        Raises:
            WorldError: rank 0 has ended.
        """
        if not is_first:
            return cls(AnonymousFile.at(store.get(_KEY).decode()))
        values = cls(AnonymousFile())
        store.set(_KEY, values._file.path)
        return values

    def clone(self) -> "SharedValues":
        """Return another instance with the same values, for another thread."""
        return SharedValues(AnonymousFile.at(self._file.path))

    def set(self, key: str, value: str) -> None:
        """Set the value of `key`.

        Raises:
            DistStoreError: another rank is frozen while it sets one.
        """
        with self._locked():
            data = json.dumps({**self._read(), key: value}).encode()
            os.pwrite(self._file.handle, data, 0)
            os.ftruncate(self._file.handle, len(data))

    def get(self, key: str) -> bytes:
        """Return the value of `key`, once it is set.

        Raises:
            DistStoreError: it was not set within five minutes.
        """
        self.wait([key])
        return str(self._read()[key]).encode()

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of `keys` are set."""
        return self._read().keys() >= {*keys}

    def wait(self, keys: Sequence[str], timeout: timedelta = _WAITED) -> None:
        """Wait until all of `keys` are set.

        Raises:
            DistStoreError: they were not, within `timeout`.
        """
        until = time.monotonic() + timeout.total_seconds()
        while not self.check(keys):
            if time.monotonic() > until:
                raise dist.DistStoreError(f"not set within {timeout.total_seconds():g} s: {', '.join(keys)}")
            time.sleep(_POLL_S)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        until = time.monotonic() + _WRITTEN_S
        while not self._try_lock():
            if time.monotonic() > until:
                raise dist.DistStoreError(f"another rank has been setting a value for {_WRITTEN_S:g} s: it is frozen")
            time.sleep(_POLL_S / 10)
        try:
            yield
        finally:
            fcntl.flock(self._file.handle, fcntl.LOCK_UN)

    def _try_lock(self) -> bool:
        try:
            fcntl.flock(self._file.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _read(self) -> dict[str, Any]:
        """Return all values without a lock, which a frozen rank would hold.

        Values are read again while one is set.
        """
        until = time.monotonic() + _WRITTEN_S
        while True:
            data = os.pread(self._file.handle, os.fstat(self._file.handle).st_size, 0)
            try:
                found: dict[str, Any] = _DECODER.raw_decode(data.decode() or "{}")[0]
                return found
            except ValueError as error:
                if time.monotonic() > until:
                    raise dist.DistStoreError("a rank was killed while it set a value") from error
                time.sleep(_POLL_S / 10)
