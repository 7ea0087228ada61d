"""Puts credentials from a Prefect block into the environment while a flow needs them."""

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from prefect.blocks.core import Block
from pydantic import SecretStr

from midstride.engine.config.job import TrainingJob
from midstride.engine.errors import JobError

__all__ = ["credentials_of"]

#: fields of prefect-aws's blocks -> botocore's names; `Secret` blocks hold the right-hand names themselves
_VARIABLES = {
    "aws_access_key_id": "AWS_ACCESS_KEY_ID",
    "aws_secret_access_key": "AWS_SECRET_ACCESS_KEY",
    "aws_session_token": "AWS_SESSION_TOKEN",
    "profile_name": "AWS_PROFILE",
    "region_name": "AWS_REGION",
    "minio_root_user": "AWS_ACCESS_KEY_ID",
    "minio_root_password": "AWS_SECRET_ACCESS_KEY",
    "endpoint_url": "AWS_ENDPOINT_URL",
}


#: variables that are set now: value, the value before, how many blocks hold it. Threads share one environment
_held: dict[str, tuple[str, str | None, int]] = {}
_lock = threading.Lock()


@contextmanager
def credentials_of(job: TrainingJob) -> Iterator[None]:
    """Set the variables of the job's Prefect block in the environment until the context ends.

    Processes started meanwhile inherit them. No parameter, log, artifact or file of a run contains them. Trainings
    in several threads can name the same credentials.

    Raises:
        JobError: there is no such block, or it holds something else, or another training of this process holds other
            values; the message contains nothing of its content.
    """
    name = job.snapshots.credentials if job.snapshots else None
    if name is None:
        yield
        return
    variables = _variables(name)
    _set(name, variables)
    try:
        yield
    finally:
        _unset(variables)


def _set(name: str, variables: Mapping[str, str]) -> None:
    with _lock:
        for variable, value in variables.items():
            if variable in _held and _held[variable][0] != value:
                fault = f"snapshots.credentials: another training of this process has another {variable} than {name!r}"
                raise JobError.of("the job", [f"{fault}; deploy both, and run them by run_deployment"])
        for variable, value in variables.items():
            _, before, blocks = _held.get(variable, (value, os.environ.get(variable), 0))
            _held[variable] = (value, before, blocks + 1)
        os.environ.update(variables)
        _forget_connections()


def _unset(variables: Mapping[str, str]) -> None:
    with _lock:
        for variable in variables:
            value, before, blocks = _held.pop(variable)
            if blocks > 1:
                _held[variable] = (value, before, blocks - 1)
                continue
            os.environ.pop(variable)
            if before is not None:
                os.environ[variable] = before
        _forget_connections()


def _variables(name: str) -> dict[str, str]:
    """Return the environment variables that the block called `name` holds."""
    full = name if "/" in name else f"secret/{name}"
    try:
        block: Any = Block.load(full)
    except ValueError as error:
        remedy = f"Prefect has no block {full!r}; create it in the UI under Blocks, or choose another one"
        raise JobError.of("the job", [f"snapshots.credentials: {remedy}"]) from error
    found = block.get() if hasattr(block, "get") else _fields(block)
    if isinstance(found, Mapping) and found and all(isinstance(item, str) for pair in found.items() for item in pair):
        return dict(found)
    remedy = 'environment variables are needed: {"AWS_ACCESS_KEY_ID": "...", "AWS_SECRET_ACCESS_KEY": "..."}'
    raise JobError.of("the job", [f"snapshots.credentials: block {full!r} holds something else; {remedy}"])


def _fields(block: Any) -> dict[str, str]:
    """Return the environment variables for the fields of a block of prefect-aws."""
    found = {}
    for owner in (block, getattr(block, "aws_client_parameters", None)):
        for name, variable in _VARIABLES.items():
            if value := getattr(owner, name, None):
                found[variable] = value.get_secret_value() if isinstance(value, SecretStr) else str(value)
    return found


def _forget_connections() -> None:
    from s3fs import S3FileSystem

    S3FileSystem.clear_instance_cache()  # an instance has read the environment once and for all
