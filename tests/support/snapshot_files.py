"""A store of snapshots, and ways to reach into its files."""

from pathlib import Path

from midstride.engine.snapshots.catalog import Snapshot
from midstride.engine.storage.store import Store

FILES = ["rank-00000-of-00001.safetensors", "rank-00000-of-00001.json", "metrics.csv"]


def file_of(store: Store, snapshot: Snapshot, name: str) -> Path:
    return Path(store.url) / "snapshots" / snapshot.name / name


def flip(path: Path, at: float) -> None:
    data = bytearray(path.read_bytes())
    data[min(int(len(data) * at), len(data) - 1)] ^= 1
    path.write_bytes(data)


class Killed(BaseException):
    """What a SIGKILL is to a test."""
