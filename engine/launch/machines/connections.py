"""The connections of the nodes to the launcher, and the messages on them.

A node connects and introduces itself. Every message of a node is a JSON object, and every one gets an answer:

    {"host": "gpu07", "cores": 8}    -> the number of the node, the job, the port of the ranks' store
    {"bits": {...}}                  -> the same of the first node that has sent any
    {...}: a report on its ranks     -> the plan
"""

import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from queue import SimpleQueue
from typing import Any

from midstride.engine.launch.machines.channel import Channel, MessageRefused, SecretRefused

__all__ = ["LauncherConnection", "NodeConnections", "Plan"]

#: connections that have not proved yet that they know the secret; more are closed
_MOST_UNKNOWN = 64
_PAUSE_S = 0.1


@dataclass(frozen=True)
class Plan:
    """The launcher's instructions for the nodes.

    Args:
        round: number of the newest round, from 1; 0 before the first.
        nodes: numbers of the nodes in it, in the order of ranks.
        threads: of each rank.
        end: how that round must end: "" not yet, "stop" after a snapshot, "kill" at once.
        stop: all nodes must leave, after a snapshot.
        snapshots: number of requests for a snapshot so far.
        stacks: number of requests for the stacks of all ranks so far.
        over: exit code, when no round will follow.
    """

    round: int = 0
    nodes: tuple[int, ...] = ()
    threads: int = 1
    end: str = ""
    stop: bool = False
    snapshots: int = 0
    stacks: int = 0
    over: int | None = None


class NodeConnections:
    """The launcher's side: accepts nodes that know the secret and collects their messages.

    Args:
        listener: socket to which nodes connect.
        secret: of the run.
        document: JSON values that an introduced node gets.
    """

    def __init__(self, listener: socket.socket, secret: str, document: Mapping[str, Any]) -> None:
        self._listener, self._secret, self._document = listener, secret, document
        self._messages: SimpleQueue[tuple[int, dict[str, Any]]] = SimpleQueue()
        self._plan = Plan()
        self._bits: Any = None
        self._count = 0
        self._closed = False
        self._refused: set[str] = set()
        self._lock = threading.Lock()
        self._unknown = threading.BoundedSemaphore(_MOST_UNKNOWN)
        threading.Thread(target=self._accept, name="midstride-accept", daemon=True).start()

    def publish(self, plan: Plan) -> None:
        """Answer all further reports with `plan`."""
        self._plan = plan

    def receive(self) -> list[tuple[int, dict[str, Any]]]:
        """Return the messages since the last call in order of arrival, each with its node's number."""
        return [self._messages.get() for _ in range(self._messages.qsize())]

    def close(self) -> None:
        """Accept no more nodes."""
        self._closed = True
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, address = self._listener.accept()
            except OSError:  # closed, or too many open files
                time.sleep(_PAUSE_S)
                continue
            if not self._unknown.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection, address[0]), daemon=True).start()

    def _serve(self, connection: socket.socket, peer: str) -> None:
        """Answer one peer until its connection ends."""
        with connection, suppress(OSError):
            try:
                channel = Channel.accept(connection, self._secret)
            except SecretRefused as error:
                if peer not in self._refused:
                    self._refused.add(peer)
                    print(f"a connection from {peer} was refused: {error}", flush=True)
                return
            finally:
                self._unknown.release()
            try:
                self._answer(channel)
            except MessageRefused as error:
                print(f"a node's connection from {peer} was closed: {error}", flush=True)

    def _answer(self, channel: Channel) -> None:
        hello = channel.receive()
        with self._lock:
            self._count += 1
            number = self._count
        self._messages.put((number, hello))
        channel.send({"node": number, **self._document})
        while True:
            message = channel.receive()
            if "bits" in message:
                with self._lock:
                    self._bits = self._bits or message["bits"]
                channel.send(self._bits)
            else:
                self._messages.put((number, message))
                channel.send(asdict(self._plan))


class LauncherConnection:
    """The node's side.

    Args:
        host: of the launcher.
        port: of the launcher.
        secret: of the run.

    Raises:
        SecretRefused: launcher and node have different secrets.
        OSError: no launcher answers there.
    """

    def __init__(self, host: str, port: int, secret: str) -> None:
        self._channel = Channel.connect(host, port, secret)

    def introduce(self, host: str, cores: int) -> dict[str, Any]:
        """Send the name and the cores of this node; return its number and the launcher's document."""
        document: dict[str, Any] = self._ask({"host": host, "cores": cores})
        return document

    def first_bits(self, bits: dict[str, Any]) -> dict[str, Any]:
        """Return the `bits` of the first node that has sent any, as JSON values."""
        first: dict[str, Any] = self._ask({"bits": bits})
        return first

    def report(self, message: dict[str, Any]) -> Plan:
        """Send a message about the ranks of this node; return the newest plan."""
        answer: dict[str, Any] = self._ask(message)
        nodes: list[Any] = answer.pop("nodes")
        return Plan(**answer, nodes=tuple(nodes))

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def _ask(self, message: dict[str, Any]) -> Any:
        self._channel.send(message)
        return self._channel.receive()
