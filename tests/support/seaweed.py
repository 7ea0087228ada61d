"""SeaweedFS: a real S3 server, one binary, for tests. It dies with the process that started it."""

import functools
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from s3fs import S3FileSystem
from support.limit import LIMIT_S
from support.ports import NEIGHBOUR, free_ports

from midstride.engine.processes.lifetime import die_with_parent

#: the owner makes buckets; what is tested has a key that may read, write and list
OWNER, KEY, SECRET = "owner", "testkey", "a-secret-that-nobody-writes-down"
#: what dies with its parent dies with the thread that started it, so that one lasts
_STARTER = ThreadPoolExecutor(1, thread_name_prefix="seaweed")


class Seaweed:
    """A server on free ports of the loopback, its data in `folder`.

    Args:
        folder: where it keeps what it is given; it survives `kill` and `start`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ports = free_ports(5)
        self.port = self._ports[0]
        self._process: subprocess.Popen[bytes] | None = None
        (folder / "data").mkdir(parents=True)
        identities = [
            {"name": "owner", "credentials": [_keys(OWNER)], "actions": ["Admin"]},
            {"name": "tests", "credentials": [_keys(KEY)], "actions": ["Read", "Write", "List"]},
        ]
        (folder / "s3.json").write_text(json.dumps({"identities": identities}))
        self.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_up(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @contextmanager
    def reached(self, **changes: str) -> Iterator[None]:
        """Let this process, and those it starts, find the server; `changes` go on top."""
        S3FileSystem.clear_instance_cache()  # an instance has read the environment once and for all
        with mock.patch.dict(os.environ, {**environment(self.endpoint), **changes}):
            yield
        S3FileSystem.clear_instance_cache()

    def start(self) -> None:
        """Start it, and wait until it takes a file."""
        master, volume, filer, admin = self._ports[1:]
        options = {
            **{"dir": self.folder / "data", "ip": "127.0.0.1", "ip.bind": "127.0.0.1", "s3.port": self.port},
            **{"master.port": master, "volume.port": volume, "filer.port": filer, "admin.port": admin},
            **{"s3.port.iceberg": 0, "s3.port.lance": 0, "s3.config": self.folder / "s3.json"},
            # A lone master need not wait for others after a kill: twenty seconds, otherwise.
            **{"master.resumeState": "false", "master.electionTimeout": "1s"},
            **{"master.telemetry": "false", "webdav": "false", "admin.ui": "false"},
        }
        command = [str(Path(sys.executable).parent / "weed"), "-logtostderr", "mini"]
        with (self.folder / "log.txt").open("ab") as log:
            self._process = _STARTER.submit(
                subprocess.Popen,
                [*command, *(f"-{name}={value}" for name, value in options.items())],
                **{"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "start_new_session": True},
                preexec_fn=functools.partial(die_with_parent, os.getpid()),
            ).result()
        self._wait_until_up()

    def _wait_until_up(self) -> None:
        until = time.monotonic() + LIMIT_S
        while not self._takes_a_file():
            assert self._process is not None
            assert self._process.poll() is None, f"the server ended:\n{(self.folder / 'log.txt').read_text()[-2000:]}"
            assert time.monotonic() < until, f"the server did not start within {LIMIT_S:.0f} s"
            time.sleep(0.05)

    def _takes_a_file(self) -> bool:
        bucket = f"probe-{uuid.uuid4().hex}"
        try:
            self.call("create_bucket", Bucket=bucket)
            self.call("put_object", Bucket=bucket, Key="probe", Body=b"probe")
        except Exception:
            return False
        return True

    def call(self, method: str, **arguments: Any) -> Any:
        """Ask the server by a client of its own, with no retries."""
        import botocore.session
        from botocore.config import Config

        client = botocore.session.Session().create_client(
            "s3",
            region_name="us-east-1",
            endpoint_url=self.endpoint,
            aws_access_key_id=OWNER,
            aws_secret_access_key=SECRET,
            config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}, read_timeout=20),
        )
        try:
            return getattr(client, method)(**arguments)
        finally:
            client.close()

    def bucket(self) -> str:
        """Make a bucket; return its URL."""
        name = f"bucket-{uuid.uuid4().hex[:12]}"
        self.call("create_bucket", Bucket=name)
        return f"s3://{name}"

    def keys(self, url: str) -> list[str]:
        """Return the keys below `url`, sorted, without its prefix."""
        bucket, _, prefix = url.removeprefix("s3://").partition("/")
        found = self.call("list_objects_v2", Bucket=bucket, Prefix=f"{prefix}/" if prefix else "")
        return sorted(item["Key"].removeprefix(f"{prefix}/") for item in found.get("Contents", []))

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        for port in (*self._ports, *(port + NEIGHBOUR for port in self._ports)):
            for socket_file in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                socket_file.unlink()

    def freeze(self) -> None:
        """Let it neither answer nor end."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


def environment(endpoint: str, key: str = KEY, secret: str = SECRET) -> dict[str, str]:
    """The variables by which a program finds a server and its credentials; no file of this machine counts."""
    nowhere = os.devnull
    return {
        **{"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret},
        **{"AWS_REGION": "us-east-1", "AWS_CONFIG_FILE": nowhere, "AWS_SHARED_CREDENTIALS_FILE": nowhere},
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def _keys(key: str) -> dict[str, str]:
    return {"accessKey": key, "secretKey": SECRET}
