"""What a file on S3 costs: midstride's store, s3fs alone and boto3's managed transfers, interleaved, on one server.

make bench-s3

The server is a SeaweedFS on the loopback, which takes a part of the processors for itself. boto3 has a row where it is
installed (`.venv/bin/uv pip install --no-deps boto3 s3transfer jmespath`); it reads and writes a file in memory,
which is what its managed transfers are for.
"""

import argparse
import importlib.util
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from s3fs import S3FileSystem
from support.seaweed import Seaweed

from midstride.engine.storage.s3 import S3Store

Act = Callable[[], Any]


class Ours:
    """The store of a run: `write` and `read` of a file that may be large."""

    def __init__(self, url: str, content: bytes) -> None:
        self._store, self._content = S3Store(url), content

    def write(self) -> None:
        self._store.write("ours.safetensors", memoryview(self._content))

    def read(self) -> int:
        return len(self._store.read("ours.safetensors"))


class S3fs:
    """s3fs as it comes."""

    def __init__(self, url: str, content: bytes) -> None:
        self._url, self._content = f"{url}/s3fs", content
        self._files = S3FileSystem(use_listings_cache=False)

    def write(self) -> None:
        self._files.pipe_file(self._url, self._content)

    def read(self) -> int:
        return len(self._files.cat_file(self._url))


class Boto3:
    """boto3's `upload_file` and `download_file` as they come: parts of 8 MiB by ten threads."""

    def __init__(self, url: str, content: bytes) -> None:
        import boto3

        self._bucket = url.removeprefix("s3://")
        self._client = boto3.client("s3")
        folder = Path("/dev/shm")
        self._file = tempfile.NamedTemporaryFile(dir=folder if folder.is_dir() else None)  # noqa: SIM115 - of the process
        self._file.write(content)
        self._file.flush()

    def write(self) -> None:
        self._client.upload_file(self._file.name, self._bucket, "boto3")

    def read(self) -> int:
        with tempfile.TemporaryDirectory(dir=Path(self._file.name).parent) as folder:
            self._client.download_file(self._bucket, "boto3", f"{folder}/read")
            return Path(f"{folder}/read").stat().st_size


CLIENTS: dict[str, Any] = {"midstride": Ours, "s3fs": S3fs}
if importlib.util.find_spec("boto3") is not None:
    CLIENTS |= {"boto3": Boto3}


def seconds(act: Act) -> tuple[float, float]:
    """Return the wall time of `act`, and what it takes of this process's processors."""
    began, cpu = time.perf_counter(), time.process_time()
    act()
    return time.perf_counter() - began, time.process_time() - cpu


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--size", type=float, default=400e6, help="bytes")
    options = parser.parse_args()
    content = os.urandom(int(options.size))
    with tempfile.TemporaryDirectory() as folder:
        server = Seaweed(Path(folder) / "server")
        try:
            with server.reached():
                found = measured(server.bucket(), content, options.rounds)
        finally:
            server.kill()
    table = Table("client", "write, MB/s", "CPU, s", "of the first", "read, MB/s", "CPU, s", "of the first")
    table.title = f"{options.size / 1e6:.0f} MB, median of {options.rounds} interleaved rounds [from-to]"
    reference = "boto3" if "boto3" in found else "s3fs"
    for name, times in found.items():
        cells: list[str] = []
        for act, (walls, cpus) in times.items():
            ratios = sorted(b / a for a, b in zip(walls, found[reference][act][0], strict=True))
            cells += [
                f"{options.size / 1e6 / statistics.median(walls):.0f}",
                f"{statistics.median(cpus):.2f}",
                f"{statistics.median(ratios):.2f} [{ratios[0]:.2f}-{ratios[-1]:.2f}]",
            ]
        table.add_row(name, *cells)
    table.columns[3].header = table.columns[6].header = f"x {reference}"
    Console(width=120).print(table)


Times = dict[str, dict[str, tuple[list[float], list[float]]]]


def measured(url: str, content: bytes, rounds: int) -> Times:
    """Return client -> "write" and "read" -> wall and CPU seconds, a number a round, after one that does not count."""
    clients = {name: client(url, content) for name, client in CLIENTS.items()}
    found: Times = {name: {"write": ([], []), "read": ([], [])} for name in clients}
    for number in range(rounds + 1):
        for name in list(clients)[:: -1 if number % 2 else 1]:
            for act in ("write", "read"):
                wall_s, cpu_s = seconds(getattr(clients[name], act))
                if number:
                    found[name][act][0].append(wall_s)
                    found[name][act][1].append(cpu_s)
    return found


if __name__ == "__main__":
    main()
