"""A network of machines on this one: namespaces on a bridge, whose links can be cut. Needs root and `ip`."""

import os
import shutil
import subprocess
from functools import cache

_SUBNET = "10.79.0."


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@cache
def why_no_network() -> str:
    """Return why there can be none here; "" if there can be."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        return "network namespaces need root, ip (iproute2) and unshare (util-linux)"
    try:
        with Network(1):
            return ""
    except subprocess.CalledProcessError as error:
        return f"network namespaces: {error.stderr.strip()}"


class Network:
    """Machine k has the address 10.79.0.k, the host name machine-k and processes of its own; files are shared.

    Neither this machine nor any other reaches it.

    Args:
        machines: how many, from 1.
    """

    def __init__(self, machines: int) -> None:
        self._machines = range(1, machines + 1)
        self._name = f"midstride{os.getpid()}"

    def __enter__(self) -> "Network":
        """Make the machines and their cables."""
        try:
            _run("ip", "netns", "add", self._switch)
            _run("ip", "-n", self._switch, "link", "add", "switch", "type", "bridge")
            _run("ip", "-n", self._switch, "link", "set", "switch", "up")
            for machine in self._machines:
                self._add(machine)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Remove them."""
        for name in (*map(self._space, self._machines), self._switch):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def _add(self, machine: int) -> None:
        name, port = self._space(machine), f"port{machine}"
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", port, "netns", self._switch)
        _run("ip", "-n", self._switch, "link", "set", port, "master", "switch", "up")
        _run("ip", "-n", name, "addr", "add", f"{self.address(machine)}/24", "dev", "eth0")
        _run("ip", "-n", name, "link", "set", "eth0", "up")

    @property
    def _switch(self) -> str:
        return f"{self._name}-switch"

    def _space(self, machine: int) -> str:
        return f"{self._name}-{machine}"

    @property
    def head(self) -> int:
        """The last machine."""
        return self._machines[-1]

    def address(self, machine: int) -> str:
        """Return by which the others reach a machine."""
        return f"{_SUBNET}{machine}"

    def command(self, machine: int, *command: str) -> list[str]:
        """Return what runs `command` on a machine; the death of the process that runs it is that of the machine."""
        # The shell stays: the first process of a machine hears no signal that it has no handler for.
        space = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        shell = ["sh", "-c", f'hostname machine-{machine}; "$@"; exit $?', "sh"]
        return ["ip", "netns", "exec", self._space(machine), *space, *shell, *command]

    def cut(self, machine: int) -> None:
        """Pull a machine's cable: nothing is heard of it, not even an end of its connections."""
        _run("ip", "-n", self._switch, "link", "set", f"port{machine}", "down")

    def heal(self, machine: int) -> None:
        """Put the cable back."""
        _run("ip", "-n", self._switch, "link", "set", f"port{machine}", "up")
