"""Stores that wait or fail where a test says."""

import threading
from typing import Any

import pytest
from support.limit import LIMIT_S

from midstride.engine.storage.local import LocalStore
from midstride.engine.storage.store import Store


class Gated:
    """A probe at which the writer waits until it is let through."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self, phase: str) -> None:
        if phase == "snapshot_write":
            self.reached.set()
            assert self.open.wait(LIMIT_S)


def refuse(error: OSError, prefix: str, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no file be written whose path begins with `prefix`."""
    write = LocalStore.write

    def refusing(self: LocalStore, path: str, data: Any, **options: Any) -> None:
        if path.startswith(prefix):
            raise error
        write(self, path, data, **options)

    monkeypatch.setattr(LocalStore, "write", refusing)
