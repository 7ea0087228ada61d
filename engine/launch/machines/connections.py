"""What the launcher and the nodes tell each other: JSON in a key-value store of torch's, which the launcher serves.

job                what is trained
bits               what decides the bits of the first node that came, and its host
plan               the round that trains, who takes part, and what is asked of all; a `Plan`
nodes              how many nodes have come; each is known by its number, from 1
node/3/hello       its host and its cores
node/3/sent        how many messages it has sent
node/3/message/7   one of them, until the launcher has read it
"""

import errno
import json
import time
from dataclasses import asdict, dataclass
from typing import Any

from midstride.engine.errors import JobError, WorldError
from midstride.engine.strategies.rendezvous import serve_store
from midstride.engine.strategies.torch_internals import TCPStore

__all__ = ["NodeStore", "Plan"]

_POLL_S = 0.05


@dataclass(frozen=True)
class Plan:
    """What the launcher wants of the nodes.

    Args:
        round: the newest, from 1; 0 while there was none.
        nodes: those that train in it, in the order of ranks.
        threads: of each rank.
        end: how that round is to end: "" not yet, "stop" after a snapshot, "kill" at once.
        stop: all nodes are to leave, after a snapshot.
        snapshots: how many were asked for.
        stacks: how often the ranks were asked to write theirs to the log.
        over: the exit code, when no round will follow.
    """

    round: int = 0
    nodes: tuple[int, ...] = ()
    threads: int = 1
    end: str = ""
    stop: bool = False
    snapshots: int = 0
    stacks: int = 0
    over: int | None = None


class NodeStore:
    """The key-value store that the launcher serves, with JSON as values.

    Args:
        store: torch's.
    """

    def __init__(self, store: TCPStore) -> None:
        self.store = store
        self._read: dict[int, int] = {}

    @classmethod
    def serve(cls, rendezvous: str, patience_s: float) -> "NodeStore":
        """Return the store, served; where something listens already, once that has ended.

        Args:
            rendezvous: HOST:PORT of this machine; a free port where it is 0.
            patience_s: for what listens there to end.

        Raises:
            JobError: HOST is none of this machine's.
            WorldError: something listens there.
        """
        host, _, port = rendezvous.rpartition(":")
        until = time.monotonic() + patience_s
        while True:
            try:
                return cls(serve_store(int(port), host))
            except OSError as error:
                why = f"world.rendezvous: nothing can be served at {rendezvous}: {error.strerror or error}"
                if error.errno != errno.EADDRINUSE:
                    way_out = "say a name or an address of this machine, by which nodes reach it"
                    raise JobError(f"{why}: {way_out}") from error
                if time.monotonic() > until:
                    raise WorldError(f"{why}: choose another port, or end what listens there") from error
                time.sleep(_POLL_S)

    @property
    def port(self) -> int:
        """The port at which it is served."""
        return self.store.port

    def set(self, key: str, value: Any) -> None:
        """Write `value` at `key`."""
        self.store.set(key, json.dumps(value))

    def get(self, key: str) -> Any:
        """Return the value at `key`, waiting until there is one."""
        return json.loads(self.store.get(key))

    def publish(self, plan: Plan) -> None:
        """Have all nodes read `plan` next."""
        self.set("plan", asdict(plan))

    def plan(self) -> Plan:
        """Return the newest plan."""
        said: dict[str, Any] = self.get("plan")
        said["nodes"] = tuple(said["nodes"])
        return Plan(**said)

    def first(self, key: str, value: Any) -> Any:
        """Write `value` if there is none at `key`; return the value there."""
        return json.loads(self.store.compare_set(key, "", json.dumps(value)))

    def arrive(self, hello: dict[str, Any]) -> int:
        """Register a new node, with its host and its cores; return its number."""
        number = self.store.add("nodes", 1)
        self.set(f"node/{number}/hello", hello)
        return number

    def arrived(self) -> int:
        """Return how many nodes have come."""
        return self.store.add("nodes", 0)

    def hello(self, node: int) -> dict[str, Any] | None:
        """Return what a node has registered with; None if it has a number and has not yet said more."""
        key = f"node/{node}/hello"
        found: dict[str, Any] | None = self.get(key) if self.store.check([key]) else None
        return found

    def send(self, node: int, message: dict[str, Any]) -> None:
        """Send a message of `node` to the launcher."""
        number = self.store.add(f"node/{node}/sent", 0)
        self.set(f"node/{node}/message/{number}", message)
        self.store.add(f"node/{node}/sent", 1)  # after it: what is counted is there

    def receive(self, node: int) -> list[dict[str, Any]]:
        """Return what a node has sent since the last call, in that order."""
        sent, read = self.store.add(f"node/{node}/sent", 0), self._read.get(node, 0)
        self._read[node] = sent
        keys = [f"node/{node}/message/{number}" for number in range(read, sent)]
        messages = [self.get(key) for key in keys]
        for key in keys:
            self.store.delete_key(key)
        return messages
