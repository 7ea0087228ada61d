"""A commit of very many ranks, simulated: ranks are threads with small states.

make bench-commit

What a commit needs besides its tensors: bytes of the manifest, gathers and what they carry, requests to the store.
Each request, and each round of a gather, takes a millisecond.
"""

import argparse
import pickle
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from midstride.engine.snapshots.buffer_pool import Buffer
from midstride.engine.snapshots.catalog import Position, Snapshot
from midstride.engine.snapshots.committer import Committer, SnapshotRequest
from midstride.engine.snapshots.lease import acquire
from midstride.engine.snapshots.state_copy import StateCopier
from midstride.engine.storage.local import LocalStore
from midstride.engine.world import World

LATENCY_S = 0.001
LIMIT_S = 300


class Slow(LocalStore):
    """A local store whose requests take a millisecond and are counted."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.requests: Counter[str] = Counter()

    def _request(self, name: str) -> None:
        self.requests[name] += 1
        time.sleep(LATENCY_S)

    def write(self, path: str, data: bytes | memoryview, *, check: Callable[[], None] | None = None) -> None:
        self._request("write")
        super().write(path, data, check=check)

    def write_all(self, folder: str, files: Iterable[tuple[str, bytes | memoryview]]) -> None:
        def counted() -> Iterator[tuple[str, bytes | memoryview]]:
            for file in files:
                self._request("write")
                yield file

        super().write_all(folder, counted())

    def read(self, path: str) -> bytes:
        self._request("read")
        return super().read(path)

    def list(self, path: str = "") -> list[str]:
        self._request("list")
        return super().list(path)

    def find(self, path: str = "") -> dict[str, int]:
        self._request("list")
        return super().find(path)


class Gathers:
    """Gathers among threads, in as many rounds as a tree has levels."""

    def __init__(self, size: int) -> None:
        self.count = self.carried = 0
        self._values: list[Any] = [None] * size
        self._rounds = max(1, (size - 1).bit_length())
        self._met = threading.Barrier(size, self._count, LIMIT_S)
        self._left = threading.Barrier(size, timeout=LIMIT_S)

    def _count(self) -> None:
        self.count += 1
        self.carried += len(pickle.dumps(self._values))
        time.sleep(self._rounds * LATENCY_S)

    def of(self, rank: int) -> Callable[[object], list[Any]]:
        """Return the collective as `rank` calls it."""

        def gather(value: object) -> list[Any]:
            self._values[rank] = value
            self._met.wait()
            found = [*self._values]
            self._left.wait()
            return found

        return gather


def commit(size: int) -> dict[str, float]:
    """Return what one commit of `size` ranks takes."""
    with tempfile.TemporaryDirectory() as folder:
        store, gathers = Slow(folder), Gathers(size)
        lease = acquire(store, None, {})
        worlds, state = [World(rank, size) for rank in range(size)], {"w": torch.ones(64)}
        copies = [StateCopier(world, lambda path: False).copy(state, Buffer()) for world in worlds]
        committers = [Committer(store, lease, world, gathers.of(world.rank), "sim") for world in worlds]
        store.requests.clear()

        def one(rank: int) -> Snapshot:
            request = SnapshotRequest(Position(1), copies[rank], {}, "1,row\n")
            return committers[rank].commit(request, before=lambda: None)

        began = time.perf_counter()
        with ThreadPoolExecutor(size) as pool:
            snapshot = next(iter([*pool.map(one, range(size))]))
        took = time.perf_counter() - began
        for committer in committers:
            committer.close()
        manifest = store.size(f"{snapshot.path}/manifest.json")
    requests = {name: count for name, count in store.requests.items() if name != "write"}
    return {
        "seconds": took,
        "manifest": manifest,
        "gathers": gathers.count,
        "carried": gathers.carried,
        "writes": store.requests["write"],
        "other": sum(requests.values()),
    }


def main() -> None:
    """Print a table with a row for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 16, 64, 256, 1024])
    table = Table("ranks", "commit, s", "manifest, kB", "gathers", "gathered, kB", "files", "other requests")
    table.title = "a commit, simulated"
    for size in parser.parse_args().ranks:
        found = commit(size)
        kilobytes = [f"{found[name] / 1e3:.1f}" for name in ("manifest", "carried")]
        row = [f"{found['seconds']:.2f}", kilobytes[0], found["gathers"], kilobytes[1], found["writes"], found["other"]]
        table.add_row(str(size), *map(str, row))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
