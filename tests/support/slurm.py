"""A real Slurm on this machine: a controller and several nodes, without systemd. It dies with who started it."""

import functools
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from support.limit import LIMIT_S
from support.ports import free_ports

from midstride.engine.processes.lifetime import descendants, die_with_parent, signal_all

#: where Debian has daemons, which a user's PATH may lack
_SBIN = "/usr/sbin"
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "squeue", "srun")
MISSING = [name for name in _PROGRAMS if shutil.which(name, path=f"{os.environ.get('PATH', '')}:{_SBIN}") is None]
_USER = pwd.getpwuid(os.getuid()).pw_name
NODES = ("n1", "n2", "n3")
#: what dies with its parent dies with the thread that started it, so that one lasts
_STARTER = ThreadPoolExecutor(1, thread_name_prefix="slurm")
_CONF = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SlurmdTimeout=10
MessageTimeout=10
KillWait=20
MpiDefault=none
{nodes}
PartitionName=p Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=30
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2
"""


class Slurm:
    """A controller and its nodes, all on the loopback.

    Args:
        folder: where it keeps its files; a short path, as a socket lies there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.conf = folder, folder / "slurm.conf"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._path = f"{os.environ['PATH']}:{_SBIN}"
        host, ports = socket.gethostname().partition(".")[0], free_ports(1 + len(NODES))
        nodes = [
            f"NodeName={name} NodeAddr=127.0.0.1 NodeHostname={host} Port={port} CPUs=1 State=UNKNOWN"
            for name, port in zip(NODES, ports[1:], strict=True)
        ]
        said = {"host": host, "port": ports[0], "user": _USER, "folder": folder, "nodes": "\n".join(nodes)}
        self.conf.write_text(_CONF.format(**said))
        key = folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        own = {"socket": "munge.socket", "key-file": "munge.key", "log-file": "munge.log"}
        own |= {"pid-file": "munge.pid", "seed-file": "munge.seed"}
        # --force: the folder is not everyone's.
        self._start("munged", "--foreground", "--force", *(f"--{name}={folder / file}" for name, file in own.items()))
        self._wait((folder / "munge.socket").exists, "munged")
        (folder / "state").mkdir()
        self._start("slurmctld", "-D", "-c")
        for name in NODES:
            self.power_on(name)
        self._wait(self._is_idle, "all nodes")

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which Slurm's commands find it."""
        return {"SLURM_CONF": str(self.conf)}

    @property
    def pids(self) -> set[int]:
        """The daemons."""
        return {process.pid for process in self._processes.values()}

    def ask(self, command: str) -> str:
        """Return what one of Slurm's commands prints."""
        return subprocess.run(
            command.split(), env={**os.environ, **self.environment}, capture_output=True, text=True, check=False
        ).stdout.strip()

    def jobs(self) -> list[str]:
        """Return all that is running or waiting, each as array task, state and node."""
        return self.ask("squeue --noheader --array --format=%K:%T:%N").splitlines()

    def tasks(self, node: str) -> list[int]:
        """Return the processes that a node runs, and those of Slurm's that look after them."""
        daemon = self._processes[f"slurmd-{node}"].pid
        marks = {f"SLURMD_NODENAME={node}".encode(), f"SLURM_CONF={self.conf}".encode()}  # others may have such a node
        found = {pid for pid in _pids() if marks <= {*_read(pid, "environ").split(b"\0")}} - {daemon}
        stepds = {pid for pid in _pids() if b"slurmstepd" in _read(pid, "cmdline") and found & {*descendants(pid)}}
        return sorted(found | stepds)

    def power_off(self, node: str) -> None:
        """End a node and all it runs at once, without a word: what is frozen first cannot tell of the others' end."""
        daemon = self._processes[f"slurmd-{node}"]
        pids = [daemon.pid, *self.tasks(node)]
        signal_all(pids, signal.SIGSTOP)
        signal_all(pids)
        daemon.wait()

    def power_on(self, node: str) -> None:
        """Start a node, on which the names of all nodes are known if that can be done without changing the machine."""
        (self.folder / f"spool-{node}").mkdir(exist_ok=True)
        hosts = self.folder / "hosts"
        hosts.write_text(Path("/etc/hosts").read_text() + f"\n127.0.0.1 {' '.join(NODES)}\n")
        named = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', str(hosts)]
        daemon = ["slurmd", "-D", "-N", node]
        self._start(*(named if can_mount() else []), *daemon, name=f"slurmd-{node}")

    def repair(self) -> set[int]:
        """Start the nodes that are off, and wait until all have nothing to do; return the daemons."""
        for node in NODES:
            if self._processes[f"slurmd-{node}"].poll() is not None:
                self.power_on(node)
        self._wait(self._is_idle, "all nodes")
        return self.pids

    def _is_idle(self) -> bool:
        return {*self.ask("sinfo -h -N -o %T").split()} == {"idle"}

    def close(self) -> None:
        """End everything."""
        self.ask("scancel --full --signal=KILL --user=" + _USER)
        for node in NODES:
            signal_all(self.tasks(node))
        for process in reversed(self._processes.values()):
            process.kill()
            process.wait()

    def log(self) -> str:
        """Return what its daemons have said."""
        return "\n".join(f"{path.name}:\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.txt")))

    def _start(self, program: str, *arguments: str, name: str = "") -> None:
        with (self.folder / f"{name or program}.txt").open("ab") as log:
            self._processes[name or program] = _STARTER.submit(
                subprocess.Popen,
                [str(shutil.which(program, path=self._path)), *arguments],
                **{"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "start_new_session": True},
                env={**os.environ, **self.environment, "PATH": self._path},
                preexec_fn=functools.partial(die_with_parent, os.getpid()),
            ).result()

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + LIMIT_S
        while not condition():
            assert all(process.poll() is None for process in self._processes.values()), self.log()
            assert time.monotonic() < until, f"{what} did not come:\n{self.log()}"
            time.sleep(0.05)


@functools.cache
def can_mount() -> bool:
    """Whether a process may be given files of its own in place of the machine's: root may, mostly."""
    mount = ["unshare", "--mount", "mount", "--bind", "/etc/hosts", "/etc/hosts"]
    return bool(shutil.which("unshare")) and subprocess.run(mount, capture_output=True, check=False).returncode == 0


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # it has ended meanwhile
        return b""
