"""Credentials from a Prefect block: a flow reaches its store by them, and they are written down nowhere."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect import get_client
from prefect.blocks.core import Block
from prefect.blocks.system import Secret
from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId
from pydantic import BaseModel, SecretStr
from s3fs import S3FileSystem
from support.nightly_job import House
from support.seaweed import KEY, SECRET, Seaweed, environment

from midstride.engine.config.job import TrainingJob
from midstride.engine.config.loggers import LoggerOptions
from midstride.engine.config.options import SnapshotOptions
from midstride.engine.errors import JobError
from midstride.engine.storage.store import Store
from midstride.flows.nightly import nightly
from midstride.flows.train import train
from midstride.tasks.credentials import credentials_of

Make = Callable[..., TrainingJob]
KEY_OF_A_TRACKER = "MLFLOW_TRACKING_TOKEN"
SECRETS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


class ClientParameters(BaseModel):
    endpoint_url: str | None = None


class AwsCredentials(Block):
    """The fields of prefect-aws's block of that name."""

    _block_type_slug = "aws-credentials"
    aws_access_key_id: str | None = None
    aws_secret_access_key: SecretStr | None = None
    region_name: str | None = None
    aws_client_parameters: ClientParameters = ClientParameters()


def with_store(job: TrainingJob, url: str, credentials: str | None) -> TrainingJob:
    options = SnapshotOptions(url=url, credentials=credentials, every_steps=5)
    trainer = job.trainer.model_copy(update={"max_steps": 6})
    return job.model_copy(update={"snapshots": options, "trainer": trainer})


@pytest.fixture
def stranger(s3: Seaweed) -> Iterator[Seaweed]:
    """The server, to a client that has no credentials."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(s3.endpoint).items():
            if name not in SECRETS:
                patch.setenv(name, value)
        S3FileSystem.clear_instance_cache()
        yield s3
    S3FileSystem.clear_instance_cache()


def test_a_flow_has_them_and_writes_them_nowhere(
    make_job: Make, stranger: Seaweed, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    Secret(value={name: environment("")[name] for name in SECRETS}).save("the-store", overwrite=True)
    url = f"{stranger.bucket()}/runs"
    state = train(with_store(make_job(processes=1), url, "the-store"), "night", return_state=True)
    assert state.result().outcome == "done"
    with get_client(sync_client=True) as client:
        flow_run = client.read_flow_run(state.state_details.flow_run_id)
        logs = client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[flow_run.id])))
        artifacts: Any = client.read_artifacts()
    assert flow_run.parameters["job"]["snapshots"]["credentials"] == "the-store"
    keys = stranger.keys(url)
    assert {"night/run.json", "night/attempts/000001.json"} <= set(keys)
    texts = [str(flow_run.parameters), *(log.message for log in logs), *map(str, artifacts)]
    texts += [caplog.text, *capfd.readouterr()]
    with stranger.reached():
        store = Store.open(url)
        texts += [store.read(key).decode("latin-1") for key in keys]
    for secret in (KEY, SECRET):
        assert not any(secret in text for text in texts)
    assert not set(SECRETS) & set(os.environ), "they go with the flow"


def test_a_night_reaches_its_champions_by_them(stranger: Seaweed, tmp_path: Path) -> None:
    Secret(value={name: environment("")[name] for name in SECRETS}).save("the-store", overwrite=True)
    house, url = House(tmp_path), f"{stranger.bucket()}/runs"
    house.comes_in(1, 1.0)
    report = nightly(house.job(f"snapshots.url={url}", "snapshots.credentials=the-store"), house.date(1))
    assert report.champion == "level-2026-03-01"
    assert "_champions/level/000001.json" in stranger.keys(url)
    assert not set(SECRETS) & set(os.environ), "they go with the flow"


def test_a_tracker_has_its_key_by_them(make_job: Make, tmp_path: Path) -> None:
    Secret(value={KEY_OF_A_TRACKER: "hush"}).save("the-tracker", overwrite=True)
    job = with_store(make_job(processes=1), "runs", "the-tracker")
    asked = LoggerOptions(path="model:Keyed", args={"variable": KEY_OF_A_TRACKER, "to": f"{tmp_path}/told"})
    train(job.model_copy(update={"loggers": (asked,)}), "night")
    assert (tmp_path / "told").read_text() == "hush"
    assert b"hush" not in b"".join(path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file())
    assert KEY_OF_A_TRACKER not in os.environ


def test_blocks_of_prefect_aws_are_understood(make_job: Make, stranger: Seaweed) -> None:
    parameters = ClientParameters(endpoint_url="http://there:9000")
    block = AwsCredentials(
        aws_access_key_id=KEY, aws_secret_access_key=SecretStr(SECRET), aws_client_parameters=parameters
    )
    block.save("cloud", overwrite=True)
    with credentials_of(with_store(make_job(processes=1), "s3://bucket/runs", "aws-credentials/cloud")):
        assert [os.environ[name] for name in (*SECRETS, "AWS_ENDPOINT_URL")] == [KEY, SECRET, "http://there:9000"]
    assert os.environ["AWS_ENDPOINT_URL"] == stranger.endpoint
    assert not set(SECRETS) & set(os.environ)


def test_a_block_that_is_of_no_use_is_named_and_not_shown(make_job: Make, stranger: Seaweed) -> None:
    Secret(value="hush").save("wrong", overwrite=True)
    words = {"wrong": "block 'secret/wrong' holds something else", "gone": "Prefect has no block 'secret/gone'"}
    for name, said in words.items():
        with pytest.raises(JobError, match=said) as caught, credentials_of(with_store(make_job(), "s3://b/runs", name)):
            pass
        assert "hush" not in str(caught.value)
