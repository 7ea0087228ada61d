"""Tests that every store passes."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from midstride.engine.storage.store import Store

__all__ = ["StoreLaws"]

#: threads that create the same file at once
RACERS = 8


class StoreLaws:
    """Tests of a store. A subclass has a fixture `store`, which returns an empty store.

    class TestMine(StoreLaws):
        @pytest.fixture
        def store(self, tmp_path):
            return MyStore(f"mine://{tmp_path}/runs")
    """

    #: whether exactly one of concurrent `create` calls succeeds; without that, `snapshots.lease: none` is needed
    creates_exclusively = True

    def test_a_file_is_what_was_written_last(self, store: Store) -> None:
        """`write` replaces the whole file; `read`, `stream` and `size` agree on its content."""
        store.write("folder/two", b"22")
        store.write("folder/two", memoryview(b"222"))
        store.write("empty", b"")
        assert store.read("folder/two") == b"".join(store.stream("folder/two")) == b"222"
        assert (store.size("folder/two"), store.size("empty")) == (3, 0)
        assert [store.exists(path) for path in ("folder/two", "folder", "other")] == [True, False, False]

    def test_bytes_are_any_bytes_and_any_number(self, store: Store) -> None:
        """A file of several chunks is read as it was written."""
        data = bytes(range(256)) * (3 << 12)
        store.write("large", data)
        assert b"".join(map(bytes, store.stream("large"))) == store.read("large") == data
        for ranges in ([], [(5, 9), (len(data) - 3, len(data))], [(0, len(data) // 2), (7, 8)]):
            wanted = b"".join(data[start:end] for start, end in ranges)
            assert b"".join(map(bytes, store.stream("large", ranges))) == wanted

    def test_files_of_a_folder_are_written_together(self, store: Store) -> None:
        """`write_all` writes each of its files, and consumes them one at a time."""
        store.write("a/folder/two", b"2")
        store.write_all("a/folder", ((name, data) for name, data in (("one", b"1"), ("two", memoryview(b"22")))))
        assert store.find("a/folder") == {"one": 1, "two": 2}
        assert store.read("a/folder/two") == b"22"

    def test_a_folder_is_listed_by_the_names_in_it(self, store: Store) -> None:
        """`list` returns sorted names, `find` paths and sizes in bytes, `at` the folder as a store."""
        assert store.list() == store.list("no/where") == []
        for path in ("b/two", "b/one", "b-a", "b/deep/three"):
            store.write(path, b"1")
        assert store.list() == ["b", "b-a"]
        assert store.list("b") == store.at("b").list() == ["deep", "one", "two"]
        assert store.find("b") == {"deep/three": 1, "one": 1, "two": 1}
        assert store.at("b").read("one") == b"1"

    def test_what_is_not_there_is_a_file_not_found(self, store: Store) -> None:
        """Reading a missing file raises FileNotFoundError, which tells it from a failing store."""
        for ask in (store.read, store.size, lambda path: list(store.stream(path))):
            with pytest.raises(FileNotFoundError):
                ask("no/where")

    def test_what_is_removed_is_gone(self, store: Store) -> None:
        """`remove` deletes files and whole folders, and accepts paths that do not exist."""
        for path in ("b/one", "b/two", "c"):
            store.write(path, b"1")
        store.remove("b/one")
        store.remove("b/one")
        store.remove("never/there")
        assert store.list("b") == ["two"]
        store.remove("b")
        assert (store.list("b"), store.list()[-1]) == ([], "c")
        assert not store.exists("b/two")

    def test_a_refused_write_leaves_what_was_there(self, store: Store) -> None:
        """`check` is called before a file changes; an error that it raises reaches the caller."""

        def refuse() -> None:
            raise PermissionError("superseded")

        store.write("file", b"old")
        with pytest.raises(PermissionError, match="superseded"):
            store.write("file", b"new", check=refuse)
        assert store.read("file") == b"old"
        assert store.list() == ["file"]

    def test_of_many_who_create_a_file_one_wins(self, store: Store) -> None:
        """Exactly one of concurrent `create` calls for one path succeeds. Leases depend on it."""
        if not self.creates_exclusively:
            pytest.skip("this store creates no file exclusively")
        gate = threading.Barrier(RACERS)

        def race(number: int, racer: int) -> bool:
            gate.wait()
            return store.create(f"lease/{number}", b"%d" % racer)

        with ThreadPoolExecutor(RACERS) as pool:
            for number in range(3):
                won = list(pool.map(race, [number] * RACERS, range(RACERS)))
                assert won.count(True) == 1
                assert store.read(f"lease/{number}") == b"%d" % won.index(True)
        store.ensure_writable()
        assert store.list() == ["lease"]
