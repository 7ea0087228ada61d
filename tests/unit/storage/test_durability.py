"""What reaches the disk in which order: after a power cut a file is whole or not there, whenever it came."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.snapshot_writers import alone, take

from midstride.engine.storage.store import Store


class SystemCalls:
    """Notes the calls that change a folder or make a change last, as they are made."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self.made: list[tuple[str, str]] = []
        for name in ("write", "fsync"):
            patch.setattr(os, name, self._noted(name, lambda handle, *_: Path(f"/proc/self/fd/{handle}").readlink()))
        for name in ("replace", "link"):
            patch.setattr(os, name, self._noted(name, lambda source, target, **_: target))
        for name in ("mkdir", "unlink"):
            patch.setattr(os, name, self._noted(name, lambda path, *_, **__: path))

    def _noted(self, name: str, path_of: Callable[..., Any]) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            path = Path(path_of(*args, **kwargs))
            if path.is_relative_to(self._folder):
                draft = path.name.startswith(".")
                self.made.append((name, "draft" if draft else str(path.relative_to(self._folder))))
            return result

        return call


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SystemCalls]:
    with monkeypatch.context() as patch:
        yield SystemCalls(tmp_path, patch)


DRAFT = [("write", "draft"), ("fsync", "draft")]
FOLDERS = [("mkdir", "a"), ("fsync", "."), ("mkdir", "a/b"), ("fsync", "a")]
ACTS: dict[str, tuple[Callable[[Store], object], list[tuple[str, str]]]] = {
    "write": (
        lambda store: store.write("file", b"data"),
        [*DRAFT, ("replace", "file"), ("fsync", ".")],
    ),
    "create": (
        lambda store: store.create("file", b"data"),
        [*DRAFT, ("link", "file"), ("unlink", "draft"), ("fsync", ".")],
    ),
    "write in a new folder": (
        lambda store: store.write("a/b/file", b"data"),
        [*FOLDERS, *DRAFT, ("replace", "a/b/file"), ("fsync", "a/b")],
    ),
    "write several": (
        lambda store: store.write_all("a/b", [("one", b"1"), ("two", b"2")]),
        [*FOLDERS, *DRAFT, *DRAFT, ("replace", "a/b/one"), ("replace", "a/b/two"), ("fsync", "a/b")],
    ),
    "remove": (
        lambda store: store.remove("there"),
        [("unlink", "there"), ("fsync", ".")],
    ),
}


@pytest.mark.parametrize("act", ACTS)
def test_a_file_and_its_name_are_durable_in_this_order(act: str, tmp_path: Path, calls: SystemCalls) -> None:
    do, expected = ACTS[act]
    (tmp_path / "there").touch()
    do(Store.open(tmp_path))
    assert calls.made == expected


def test_a_manifest_is_named_after_its_files_are_durable(tmp_path: Path, calls: SystemCalls) -> None:
    store = Store.open(tmp_path)
    (snapshot,) = take(alone(store), 1)
    folder = f"snapshots/{snapshot.name}"
    names = [("replace", f"{folder}/{name}") for name in snapshot.manifest["files"]]
    changes = [(call, path) for call, path in calls.made if path.startswith(folder) and call != "mkdir"]
    assert changes == [*names, ("fsync", folder), ("replace", f"{folder}/manifest.json"), ("fsync", folder)]
