"""What a node tells the launcher of its ranks, and what it hears from it."""

import os
import signal
import sys
import threading
import time
from dataclasses import asdict, replace
from typing import Any

from midstride.engine.launch.log_lines import without_noise
from midstride.engine.launch.nodes.join import LAUNCHER_GONE
from midstride.engine.launch.nodes.node_store import NodeStore, Plan
from midstride.engine.launch.watchdog import write_stacks
from midstride.engine.processes.lifetime import children, is_suspended, signal_all
from midstride.engine.session.events import EventTail
from midstride.engine.session.heartbeat import HeartbeatReading
from midstride.engine.session.outcome import CODES
from midstride.engine.session.session import Session

__all__ = ["NodeReport"]


_EVERY_S = 0.2
#: a launcher that has not answered for so long is gone
_SILENT_S = 30.0
_LOG_BYTES = 1 << 20


class NodeReport:
    """Exchanges messages with the launcher on a thread; ends this process and its ranks if it says so, or is gone.

    Args:
        store: the launcher's, used by the thread alone.
        node: this node's number.
        session: of this node, whose log its ranks print into.
    """

    def __init__(self, store: NodeStore, node: int, session: Session) -> None:
        self._store, self._node, self._node_session = store, node, session
        self._session: Session | None = None  # of the ranks in this round
        self._events = EventTail(session.events)
        self._plan = Plan()
        self._round = self._log_offset = self._stacks = 0
        self._told: set[str] = set()
        self._waits = False
        self._begun = threading.Event()
        self._spoke_at = time.monotonic()
        self._lock = threading.Lock()
        for work in (self._talk, self._watch):
            threading.Thread(target=work, name="midstride-node", daemon=True).start()

    def next_round(self) -> Plan:
        """Tell the launcher that the ranks here have ended; return the next round with this node, waiting for it."""
        self._begun.clear()
        self._waits = True
        self._begun.wait()
        return self._plan

    def round_ends(self) -> bool:
        """Whether the ranks here are to end."""
        plan = self._plan
        return bool(plan.end) or plan.round != self._round

    @property
    def all_stop(self) -> bool:
        """Whether the launcher has asked all nodes to leave."""
        return self._plan.stop

    def leave(self, why: str) -> None:
        """Tell the launcher that this node leaves, with all that its ranks have said."""
        with self._lock:
            self._send(left=why)

    def _watch(self) -> None:
        """End this process if the launcher has been silent for too long: a link that is cut raises no error."""
        while time.monotonic() - self._spoke_at < _SILENT_S:
            time.sleep(_EVERY_S)
        self._end(LAUNCHER_GONE, f"the launcher has not answered for {_SILENT_S:g} s")

    def _talk(self) -> None:
        while True:
            try:
                with self._lock:
                    self._send()
                    self._obey(self._store.plan())
                self._spoke_at = time.monotonic()
            except RuntimeError:
                self._end(LAUNCHER_GONE, "the launcher has gone")
            time.sleep(_EVERY_S)

    def _send(self, **more: Any) -> None:
        """Send what is new of this node and its ranks, and `more`."""
        state = {
            "round": self._round,
            "heard": self._plan.round,
            "waits": self._waits,
            "stacks": self._stacks,
        }  # before what its ranks have left
        self._store.send(self._node, {**state, "lines": self._lines(), **self._news_of_ranks(), **more})

    def _news_of_ranks(self) -> dict[str, Any]:
        """Return the heartbeats of the ranks of this round, and the events and outcomes that were not yet sent."""
        session = self._session
        if session is None:
            return {"heartbeats": {}, "events": [], "outcomes": []}
        # A process id means nothing on another machine.
        readings = {
            rank: asdict(replace(reading, pid=0, is_suspended=is_suspended(reading.pid)))
            for rank, reading in _readings(session).items()
        }
        outcomes = [outcome.to_json() for outcome in session.outcomes()]
        new = [outcome for outcome in outcomes if outcome not in self._told]
        self._told.update(new)
        events = [(event.kind, event.time, event.fields) for event in self._events.new()]
        return {"heartbeats": readings, "events": events, "outcomes": new}

    def _lines(self) -> list[str]:
        """Return the whole lines that were printed here since the last message."""
        with self._node_session.log.open("rb") as file:
            file.seek(self._log_offset)
            whole = file.read(_LOG_BYTES)
        if len(whole) < _LOG_BYTES:
            whole = whole[: max(whole.rfind(b"\n"), whole.rfind(b"\r")) + 1]  # a progress bar ends its lines with \r
        self._log_offset += len(whole)
        return without_noise(whole.decode("utf-8", errors="replace").splitlines())

    def _obey(self, plan: Plan) -> None:
        """Do what the launcher asks of this node by its newest plan."""
        before, self._plan = self._plan, plan
        if plan.over is not None:
            self._send(left="the run is over")
            self._end(LAUNCHER_GONE if plan.over == CODES["died"] else plan.over, "")
        if plan.stop and not before.stop:
            signal_all([os.getpid()], signal.SIGTERM)  # torchrun's agent passes it on, waits, and ends
        if plan.snapshots > before.snapshots:
            signal_all(children(os.getpid()), signal.SIGUSR1)
        if plan.stacks > before.stacks:
            threading.Thread(target=self._write_stacks, args=(plan.stacks,), daemon=True).start()
        if self._waits and plan.round > self._round and self._node in plan.nodes:
            self._begin(plan.round)
        elif not self._waits and (plan.end == "kill" or plan.round != self._round):
            signal_all(children(os.getpid()))  # they wait for ranks that are no more, and hear no signal

    def _write_stacks(self, asked: int) -> None:
        if self._session is not None:
            write_stacks(_readings(self._session), self._node_session.log)
        self._stacks = asked

    def _begin(self, number: int) -> None:
        session = self._node_session.of_round(number)
        session.begin(self._node_session.document())
        self._session, self._events, self._told = session, EventTail(session.events), set()
        self._round, self._waits = number, False
        self._begun.set()

    def _end(self, code: int, why: str) -> None:
        """End this process and its ranks, whatever its main thread is waiting for."""
        if why:
            print(f"{why}: the ranks here are ended", flush=True)
        signal_all(children(os.getpid()))
        sys.stdout.flush()
        os._exit(code)


def _readings(session: Session) -> dict[int, HeartbeatReading]:
    """Return the newest heartbeat of each rank on this node."""
    paths = sorted(session.folder.glob("heartbeat-rank-*"))
    return {int(path.name.rpartition("-")[2]): HeartbeatReading.read(path) for path in paths}
