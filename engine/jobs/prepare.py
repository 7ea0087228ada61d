"""Prepared data: made once, with a manifest that tells later whether they are still there."""

import os

from midstride.engine.errors import EngineError, StoreUnsafe, UserCodeError
from midstride.engine.jobs.build import build_data
from midstride.engine.runs.run import Run
from midstride.engine.storage.listing import FolderListing, list_folder
from midstride.engine.storage.urls import PASSWORD, absolute_url, holds_password

__all__ = ["prepare"]


def prepare(run: Run) -> FolderListing:
    """Have the data module prepare its data; return a small manifest of its files.

    A data module that keeps its data in `self.folder` (a path or an fsspec URL) can be checked later; of any
    other, nothing is known.

    Raises:
        UserCodeError: `prepare_data` raises.
        StoreUnsafe: the folder's URL holds a password, or is not allowed to be read.
        SnapshotError: the folder's store does not answer; a retry may help.
    """
    if run.job.script is not None:  # which prepares its data itself
        return list_folder(None)
    data = build_data(run.job)
    _folder_of(data)  # raises its faults before hours of work
    try:
        data.prepare_data()
    except EngineError:
        raise
    except Exception as error:
        raise UserCodeError.of("while preparing the data", error) from error
    return list_folder(_folder_of(data))


def _folder_of(data: object) -> str | None:
    folder = getattr(data, "folder", None)
    if not isinstance(folder, (str, os.PathLike)):
        return None
    url = os.fspath(folder)
    if holds_password(url):
        raise StoreUnsafe(f"data_args: {PASSWORD}")
    return absolute_url(url)
