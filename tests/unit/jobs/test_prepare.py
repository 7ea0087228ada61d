"""Prepared data, wherever they lie: known again as long as they are there, under their names and with their sizes."""

import uuid
from collections.abc import Callable

import fsspec
import pytest

from midstride.engine.config.job import TrainingJob
from midstride.engine.errors import StoreUnsafe
from midstride.engine.jobs.prepare import prepare
from midstride.engine.runs.run import Run
from midstride.engine.storage.listing import is_unchanged

MODEL = """
import fsspec
from midstride.engine import DataModule

class Data(DataModule):
    def __init__(self, folder):
        self.folder = folder
    def prepare_data(self):
        for name in ("a", "b/c"):
            with fsspec.open(f"{self.folder}/{name}", "wb", auto_mkdir=True) as file:
                file.write(name.encode())
"""

URLS: dict[str, Callable[[pytest.FixtureRequest], str]] = {
    "local": lambda request: f"{request.getfixturevalue('tmp_path')}/data",
    "memory": lambda request: f"memory://{uuid.uuid4().hex}/data",
    "s3": lambda request: f"{request.getfixturevalue('bucket')}/data",
}


@pytest.fixture(params=URLS)
def folder(request: pytest.FixtureRequest) -> str:
    return URLS[request.param](request)


@pytest.fixture
def job(folder: str, tmp_path: object) -> TrainingJob:
    name = f"prepared_{uuid.uuid4().hex}"
    with open(f"{tmp_path}/{name}.py", "w") as file:  # noqa: PTH123
        file.write(MODEL)
    document = {"name": "tiny", "module": f"{name}:Data", "data": f"{name}:Data", "data_args": {"folder": folder}}
    return TrainingJob.model_validate({**document, "trainer": {"max_steps": 1}, "folder": str(tmp_path)})


def test_data_are_known_again(job: TrainingJob, folder: str) -> None:
    manifest = prepare(Run(job, "night"))
    assert (manifest["folder"], manifest["files"], manifest["bytes"]) == (folder, 2, 4)
    assert is_unchanged(manifest)
    assert is_unchanged(prepare(Run(job, "night")))
    assert prepare(Run(job, "night")) == manifest


@pytest.mark.parametrize("loss", ["a file", "all", "a name", "a byte"])
def test_data_that_are_gone_are_missed(loss: str, job: TrainingJob, folder: str) -> None:
    manifest = prepare(Run(job, "night"))
    files, path = fsspec.core.url_to_fs(folder, use_listings_cache=False)
    if loss == "all":
        files.rm(path, recursive=True)
    elif loss == "a byte":
        files.pipe_file(f"{path}/a", b"ab")
        files.pipe_file(f"{path}/b/c", b"bc")  # as many bytes as before, in all
    else:
        files.rm(f"{path}/a")
        if loss == "a name":
            files.pipe_file(f"{path}/x", b"a")
    assert not is_unchanged(manifest)


def test_a_folder_with_a_password_is_refused(job: TrainingJob) -> None:
    secret = job.model_copy(update={"data_args": {"folder": "sftp://me:open-sesame@host/data"}})
    with pytest.raises(StoreUnsafe, match="holds a password"):
        prepare(Run(secret, "night"))
