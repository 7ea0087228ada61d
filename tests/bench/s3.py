"""What a file on S3 costs: midstride's store, s3fs alone and boto3's managed transfers, interleaved, on one server.

make bench-s3

The server is a SeaweedFS on the loopback, which takes most of the processors for itself. boto3 has a row where it is
installed (`.venv/bin/uv pip install --no-deps boto3 s3transfer jmespath`); its files are in memory where there is room.
"""

import argparse
import importlib.util
import os
import statistics
import tempfile
import time
from operator import sub
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from s3fs import S3FileSystem
from support.seaweed import Seaweed

from midstride.engine.storage.s3 import S3Store


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


#: what a client does -> a row for each round: seconds of wall time, of this process's and of the server's processors
Times = dict[str, list[tuple[float, float, float]]]


def server_cpu_s(server: Seaweed) -> float:
    """Return what the server has taken of the processors."""
    user, system = Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def measured(server: Seaweed, content: bytes, rounds: int) -> dict[str, Times]:
    """Return what each client took, after a round that does not count."""
    url = server.bucket()
    clients = {name: client(url, content) for name, client in CLIENTS.items()}
    found: dict[str, Times] = {name: {"write": [], "read": []} for name in clients}
    for number in range(rounds + 1):
        for name in list(clients)[:: -1 if number % 2 else 1]:
            for act, times in found[name].items():
                before = time.perf_counter(), time.process_time(), server_cpu_s(server)
                getattr(clients[name], act)()
                after = time.perf_counter(), time.process_time(), server_cpu_s(server)
                wall_s, client_s, server_s = map(sub, after, before)
                times += [(wall_s, client_s, server_s)] * (number > 0)
    return found


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
                found = measured(server, content, options.rounds)
        finally:
            server.kill()
    reference = [*CLIENTS][-1]
    table = Table("", "client", "MB/s", f"x {reference}", "CPU of the client, s", "CPU of the server, s")
    table.title = f"{options.size / 1e6:.0f} MB, median of {options.rounds} interleaved rounds [from-to]"
    for act in ("write", "read"):
        for name in CLIENTS:
            wall_s, client_s, server_s = map(statistics.median, zip(*found[name][act], strict=True))
            ratios = sorted(b[0] / a[0] for a, b in zip(found[name][act], found[reference][act], strict=True))
            ratio = f"{statistics.median(ratios):.2f} [{ratios[0]:.2f}-{ratios[-1]:.2f}]"
            table.add_row(act, name, f"{len(content) / 1e6 / wall_s:.0f}", ratio, f"{client_s:.2f}", f"{server_s:.2f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
