"""A real etcd, in which agents of torch's meet."""

import os
import shutil
import subprocess
import urllib.request
from pathlib import Path

from support.flow_runs import wait_for
from support.ports import free_ports


def why_no_etcd() -> str:
    """Return why there is none here; "" if there is."""
    if shutil.which("etcd") is None:
        return "etcd is not installed: apt-get install etcd-server"
    return ""


class Etcd:
    """A server of one node.

    Args:
        folder: of its data, which outlive it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._ports = folder, free_ports(2)
        self.address = f"127.0.0.1:{self._ports[0]}"
        self.start()

    def start(self) -> None:
        """Start it, and return when it answers."""
        clients, peers = (f"http://127.0.0.1:{port}" for port in self._ports)
        command = [
            *("etcd", "--name=one", f"--data-dir={self._folder}", "--enable-v2=true"),
            *(f"--listen-client-urls={clients}", f"--advertise-client-urls={clients}"),
            *(f"--listen-peer-urls={peers}", f"--initial-advertise-peer-urls={peers}"),
            f"--initial-cluster=one={peers}",
        ]
        environment = {**os.environ, "ETCD_UNSUPPORTED_ARCH": os.uname().machine}
        self._process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for(self._answers, "etcd")

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.address}/health", timeout=10) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def kill(self) -> None:
        """End it without a word."""
        self._process.kill()
        self._process.wait()
