"""Prepared data: make them once, and know later whether they are still there."""

import json
import os
from pathlib import Path
from typing import Any

from midstride.engine.config.import_paths import user_error
from midstride.engine.config.job import TrainingJob
from midstride.engine.errors import EngineError, StoreUnsafe
from midstride.engine.storage.checksums import facts_of
from midstride.engine.storage.store import PASSWORD, Store, holds_password

__all__ = ["Manifest", "prepare", "still_there"]

#: what prepare returns: {"folder": where the data are or None, "files": how many, "bytes": in all, "checksum": of names
#: and sizes}
Manifest = dict[str, Any]


def prepare(job: TrainingJob) -> Manifest:
    """Have the job's data module prepare its data; return a small manifest of what is there then.

    A data module that keeps its data in `self.folder` (a path or an fsspec URL) can be checked later; of any
    other, nothing is known.

    Raises:
        UserCodeError: `prepare_data` raises.
        StoreUnsafe: the folder's URL holds a password, or is not allowed to be read.
        SnapshotError: the folder's store does not answer; a retry may help.
    """
    data = job.build_data()
    _folder_of(data)  # what is wrong with it, before hours of work
    try:
        data.prepare_data()
    except EngineError:
        raise
    except Exception as error:
        raise user_error(error, "while preparing the data") from error
    return _manifest(_folder_of(data))


def still_there(manifest: Manifest) -> bool:
    """Whether the data are as `prepare` left them, as far as names and sizes tell."""
    return _manifest(manifest["folder"]) == manifest


def _folder_of(data: object) -> str | None:
    folder = getattr(data, "folder", None)
    if not isinstance(folder, (str, os.PathLike)):
        return None
    url = os.fspath(folder)
    if holds_password(url):
        raise StoreUnsafe(f"data_args: {PASSWORD}")
    return url if "://" in url else str(Path(url).absolute())


def _manifest(url: str | None) -> Manifest:
    if url is None:
        return {"folder": None, "files": 0, "bytes": 0, "checksum": ""}
    store = Store.open(url)
    with store.in_words("read"):
        found = store.find()
    listing = json.dumps(found, sort_keys=True).encode()
    return {
        "folder": url,
        "files": len(found),
        "bytes": sum(found.values()),
        "checksum": facts_of([listing])["xxh3_128"],
    }
