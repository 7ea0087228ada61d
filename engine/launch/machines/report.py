"""Messages of a node about its ranks, and the launcher's plans that it follows."""

import os
import signal
import sys
import threading
import time
from dataclasses import asdict, replace
from typing import Any

from midstride.engine.launch.log_lines import without_noise
from midstride.engine.launch.machines.channel import MessageRefused
from midstride.engine.launch.machines.connections import LauncherConnection, Plan
from midstride.engine.launch.machines.join import LAUNCHER_GONE
from midstride.engine.launch.watchdog import RunningClock, write_stacks
from midstride.engine.processes.lifetime import children, is_suspended, signal_all
from midstride.engine.session.events import EventTail
from midstride.engine.session.heartbeat import HeartbeatReading
from midstride.engine.session.outcome import CODES
from midstride.engine.session.session import Session

__all__ = ["NodeReport"]


_EVERY_S = 0.2
#: seconds without an answer after which the launcher counts as gone
_SILENT_S = 30.0
_LOG_BYTES = 1 << 20


class NodeReport:
    """Exchanges messages with the launcher on a thread; ends this process and ranks on request.

    It also ends them when the launcher is gone.

    Args:
        launcher: the connection to it.
        node: this node's number.
        session: of this node, whose log its ranks print into.
    """

    def __init__(self, launcher: LauncherConnection, node: int, session: Session) -> None:
        self._launcher, self._node, self._node_session = launcher, node, session
        self._session: Session | None = None  # of the ranks in this round
        self._events = EventTail(session.events)
        self._plan = Plan()
        self._round = self._log_offset = self._stacks_written = 0
        self._outcomes_sent: set[str] = set()
        self._is_waiting = False
        self._begun = threading.Event()
        self._answered = threading.Event()
        self._lock = threading.Lock()
        for work in (self._exchange_messages, self._watch_launcher):
            threading.Thread(target=work, name="midstride-node", daemon=True).start()

    def next_round(self) -> Plan:
        """Report the end of the ranks here; return the plan of the next round with this node."""
        self._begun.clear()
        self._is_waiting = True
        self._begun.wait()
        return self._plan

    def round_ends(self) -> bool:
        """Whether the ranks here must end."""
        plan = self._plan
        return bool(plan.end) or plan.round != self._round

    @property
    def all_stop(self) -> bool:
        """Whether the launcher has asked all nodes to leave."""
        return self._plan.stop

    def leave(self, why: str) -> None:
        """Report that this node leaves, with all that its ranks have printed and written."""
        with self._lock:
            self._send(left=why)

    def _watch_launcher(self) -> None:
        """End this process if the launcher is silent too long, since a cut link raises no error."""
        clock = RunningClock()
        answered_at = clock()
        while (now := clock()) - answered_at < _SILENT_S:
            if self._answered.is_set():
                self._answered.clear()
                answered_at = now
            time.sleep(_EVERY_S)
        self._end(LAUNCHER_GONE, f"the launcher has not answered for {_SILENT_S:g} s")

    def _exchange_messages(self) -> None:
        while True:
            try:
                with self._lock:
                    self._follow(self._send())
                self._answered.set()
            except MessageRefused as error:
                self._end(LAUNCHER_GONE, f"the connection to the launcher cannot be trusted: {error}")
            except OSError:
                self._end(LAUNCHER_GONE, "the launcher has gone")
            time.sleep(_EVERY_S)

    def _send(self, **more: Any) -> Plan:
        """Send the state of this node, the news of its ranks, and `more`; return the newest plan."""
        state = {
            "round": self._round,
            "heard": self._plan.round,
            "waits": self._is_waiting,
            "stacks": self._stacks_written,
        }  # read before the lines and events of its ranks
        return self._launcher.report({**state, "lines": self._lines(), **self._news_of_ranks(), **more})

    def _news_of_ranks(self) -> dict[str, Any]:
        """Return heartbeats of this round's ranks, and events and outcomes not yet sent."""
        session = self._session
        if session is None:
            return {"heartbeats": {}, "events": [], "outcomes": []}
        # A process id means nothing on another machine.
        readings = {
            rank: asdict(replace(reading, pid=0, is_suspended=is_suspended(reading.pid)))
            for rank, reading in _readings(session).items()
        }
        outcomes = [outcome.to_json() for outcome in session.outcomes()]
        new = [outcome for outcome in outcomes if outcome not in self._outcomes_sent]
        self._outcomes_sent.update(new)
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

    def _follow(self, plan: Plan) -> None:
        """Carry out the newest plan of the launcher for this node."""
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
        if self._is_waiting and plan.round > self._round and self._node in plan.nodes:
            self._begin(plan.round)
        elif not self._is_waiting and (plan.end == "kill" or plan.round != self._round):
            signal_all(children(os.getpid()))  # they wait for ranks that are no more, and hear no signal

    def _write_stacks(self, asked: int) -> None:
        if self._session is not None:
            write_stacks(_readings(self._session), self._session, self._node_session.log)
        self._stacks_written = asked

    def _begin(self, number: int) -> None:
        session = self._node_session.of_round(number)
        session.begin(self._node_session.document())
        self._session, self._events, self._outcomes_sent = session, EventTail(session.events), set()
        self._round, self._is_waiting = number, False
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
