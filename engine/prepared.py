"""Prepared data: make them once, and know later whether they are still there."""

import os
from pathlib import Path
from typing import Any

import fsspec

from midstride.engine.errors import EngineError
from midstride.engine.imports import user_error
from midstride.engine.job import TrainingJob

__all__ = ["prepare", "still_there"]

#: what prepare returns: {"folder": where the data are or None, "files": how many, "bytes": in all}
Manifest = dict[str, Any]


def prepare(job: TrainingJob) -> Manifest:
    """Have the job's data module prepare its data; return a small manifest of what is there then.

    A data module that keeps its data in `self.folder` (a path or an fsspec URL) can be checked later; of any
    other, nothing is known.

    Raises:
        UserCodeError: `prepare_data` raises.
    """
    data = job.build_data()
    try:
        data.prepare_data()
    except EngineError:
        raise
    except Exception as error:
        raise user_error(error, "while preparing the data") from error
    folder = getattr(data, "folder", None)
    if not isinstance(folder, (str, os.PathLike)):
        return {"folder": None, "files": 0, "bytes": 0}
    url = os.fspath(folder)
    return _manifest(url if "://" in url else str(Path(url).absolute()))


def still_there(manifest: Manifest) -> bool:
    """Whether the data are as `prepare` left them, as far as names and sizes tell."""
    return manifest["folder"] is None or _manifest(manifest["folder"]) == manifest


def _manifest(url: str) -> Manifest:
    filesystem, path = fsspec.core.url_to_fs(url, use_listings_cache=False)
    found = filesystem.find(path, detail=True) if filesystem.exists(path) else {}
    return {"folder": url, "files": len(found), "bytes": sum(int(facts["size"] or 0) for facts in found.values())}
