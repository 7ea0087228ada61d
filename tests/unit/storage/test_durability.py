"""What reaches the disk in which order: after a power cut a file is whole or not there, whenever it came."""

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from support.snapshot_writers import alone, take

from midstride.engine.storage.store import Store


@dataclass(frozen=True)
class Call:
    """A system call that changes a folder or makes a change last; drafts are called after their files.

    Args:
        name: of the call.
        path: that it is about.
        began: number of calls that had begun or ended when it began.
        ended: likewise when it ended.
    """

    name: str
    path: str
    began: int
    ended: int


class SystemCalls:
    """Notes such calls of any thread, in the order in which they end."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._folder, self._moments = folder, count()
        self.noted: list[Call] = []
        for name in ("write", "fsync"):
            patch.setattr(os, name, self._noting(name, lambda handle, *_: Path(f"/proc/self/fd/{handle}").readlink()))
        for name in ("replace", "link"):
            patch.setattr(os, name, self._noting(name, lambda source, target, **_: target))
        for name in ("mkdir", "unlink"):
            patch.setattr(os, name, self._noting(name, lambda path, *_, **__: path))

    def _noting(self, name: str, path_of: Callable[..., Any]) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            began = next(self._moments)
            result = real(*args, **kwargs)
            path = Path(path_of(*args, **kwargs))
            if path.is_relative_to(self._folder):
                inside = path.relative_to(self._folder)
                if path.name.startswith("."):
                    inside = inside.with_name(f"draft of {path.name[1:].rsplit('.', 2)[0]}")
                self.noted.append(Call(name, str(inside), began, next(self._moments)))
            return result

        return call

    @property
    def made(self) -> list[tuple[str, str]]:
        return [(call.name, call.path) for call in self.noted]

    def of(self, name: str, path: str) -> list[Call]:
        return [call for call in self.noted if (call.name, call.path) == (name, path)]

    def assert_in_order(self) -> None:
        """Assert that each file was durable before it got its name, and each change of a folder in the end."""
        for named in (call for call in self.noted if call.name in ("replace", "link")):
            draft = str(Path(named.path).with_name(f"draft of {Path(named.path).name}"))
            drafted = [call for call in self.noted if call.path == draft and call.ended < named.began]
            written = max(call.ended for call in drafted if call.name == "write")
            assert any(call.name == "fsync" and call.began > written for call in drafted), named
        for change in (call for call in self.noted if call.name in ("replace", "link", "unlink", "mkdir")):
            if not (change.name == "unlink" and "draft" in change.path):
                synced = self.of("fsync", str(Path(change.path).parent))
                assert any(call.began > change.ended for call in synced), change


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SystemCalls]:
    with monkeypatch.context() as patch:
        yield SystemCalls(tmp_path, patch)


def drafts(*names: str) -> list[tuple[str, str]]:
    return [(call, f"draft of {name}") for name in names for call in ("write", "fsync")]


FOLDERS = [("mkdir", "a"), ("fsync", "."), ("mkdir", "a/b"), ("fsync", "a")]
ACTS: dict[str, tuple[Callable[[Store], object], list[tuple[str, str]]]] = {
    "write": (
        lambda store: store.write("file", b"data"),
        [*drafts("file"), ("replace", "file"), ("fsync", ".")],
    ),
    "create": (
        lambda store: store.create("file", b"data"),
        [*drafts("file"), ("link", "file"), ("unlink", "draft of file"), ("fsync", ".")],
    ),
    "write in a new folder": (
        lambda store: store.write("a/b/file", b"data"),
        [
            *FOLDERS,
            *((call, f"a/b/{name}") for call, name in drafts("file")),
            ("replace", "a/b/file"),
            ("fsync", "a/b"),
        ],
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
    calls.assert_in_order()


FILES = ("one", "two", "three")


def test_several_files_are_durable_before_the_first_name(tmp_path: Path, calls: SystemCalls) -> None:
    """They do not depend on each other: their syncs may come in any order, and at once."""
    Store.open(tmp_path).write_all("a/b", [(name, b"data") for name in FILES])
    names = [("replace", f"a/b/{name}") for name in FILES]
    written = [(call, f"a/b/{draft}") for call, draft in drafts(*FILES)]
    assert sorted(calls.made) == sorted([*FOLDERS, *written, *names, ("fsync", "a/b")])
    assert calls.made[-4:] == [*names, ("fsync", "a/b")]
    calls.assert_in_order()
    first = min(call.began for call in calls.noted if call.name == "replace")
    assert max(call.ended for call in calls.noted if call.name == "fsync" and call.path != "a/b") < first


@pytest.mark.parametrize("number", range(5))
def test_without_any_one_sync_no_file_gets_its_name(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three files and two new folders are to be durable first."""
    numbers, real = count(), os.fsync

    def fail(handle: int) -> None:
        if next(numbers) == number:
            raise OSError(errno.EIO, "Broken")
        real(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="Broken"):
            Store.open(tmp_path).write_all("a/b", [(name, b"data") for name in FILES])
    assert next(numbers) == 5
    assert [*(tmp_path / "a" / "b").iterdir()] == []


def test_a_manifest_is_named_after_its_files_are_durable(tmp_path: Path, calls: SystemCalls) -> None:
    store = Store.open(tmp_path)
    (snapshot,) = take(alone(store), 1)
    folder = f"snapshots/{snapshot.name}"
    names = [("replace", f"{folder}/{name}") for name in snapshot.manifest["files"]]
    inside = [(call, path) for call, path in calls.made if path.startswith(folder) and call != "mkdir"]
    changes = [(call, path) for call, path in inside if "draft" not in path]
    assert changes == [*names, ("fsync", folder), ("replace", f"{folder}/manifest.json"), ("fsync", folder)]
    calls.assert_in_order()
    (manifest,), (synced, _) = calls.of("replace", f"{folder}/manifest.json"), calls.of("fsync", folder)
    assert max(calls.of("replace", f"{folder}/{name}")[0].ended for name in snapshot.manifest["files"]) < synced.began
    assert synced.ended < manifest.began
