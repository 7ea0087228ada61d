"""The launcher: `python -m midstride.engine.launch.machines.server SESSION GRACE_S`.

It accepts nodes, decides which of them train in which round, and writes the reports of their ranks into the session.
There `launch` reads them like those of ranks on this machine. It also serves the store in which the ranks meet, so that
any node may be lost.
"""

import errno
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

from midstride.engine.errors import EngineError, JobError, StopRequested, WorldError
from midstride.engine.formatting import format_count
from midstride.engine.launch.clusters.base import NodeJobs
from midstride.engine.launch.clusters.build import build_cluster
from midstride.engine.launch.machines.connections import NodeConnections, Plan
from midstride.engine.launch.machines.rounds import Node, RoundLog, Rounds, RoundWatchdog
from midstride.engine.launch.machines.secret import RunSecret
from midstride.engine.launch.rank import print_whole_lines
from midstride.engine.processes.lifetime import parent_of, tie_to_parent
from midstride.engine.processes.loopback import is_loopback, own_address
from midstride.engine.runs.cause import cause_of
from midstride.engine.runs.run import Run
from midstride.engine.session.events import Event
from midstride.engine.session.heartbeat import HeartbeatReading, Phase
from midstride.engine.session.outcome import Outcome, decide
from midstride.engine.session.session import Session
from midstride.engine.strategies.rendezvous import serve_store

__all__ = ["NodeServer", "main"]

_POLL_S = 0.05
#: seconds that nodes have to read that the run is over
_GOODBYE_S = 2.0
#: seconds of the grace that are left for ending what a cluster has started
_CANCEL_S = 1.0


class NodeServer:
    """Decides which nodes train, and writes their reports into the session.

    Args:
        session: read by the launcher.
        run: to train.
        host: name or address of this machine, by which nodes reach it.
        secret: of the run.
        grace_s: seconds that ranks have to take a snapshot and leave.
    """

    def __init__(self, session: Session, run: Run, host: str, secret: RunSecret, grace_s: float) -> None:
        self._session, self._run, self._host, self._secret, self._grace_s = session, run, host, secret, grace_s
        self.address = ""
        self._rounds, self._log = Rounds(run.job.world), RoundLog(session.events)
        self._watchdog = RoundWatchdog(session, run.job.world)
        self._plan = Plan()
        self._why = ""  # why this round ends, or why the last one ended
        self._why_none_comes: Callable[[], str] = str
        self._stop_by: float | None = None
        self._snapshots = 0  # that were asked for
        self._missing = 0  # nodes that a further round waits for, as was printed
        self._launcher = parent_of(os.getppid())  # above the supervisor, which asks for a stop when it is killed

    def listen(self, port: int, patience_s: float) -> None:
        """Accept nodes from now on.

        Args:
            port: 0 for a free one.
            patience_s: seconds to wait for another process to leave the port.

        Raises:
            JobError: the host is not this machine.
            WorldError: another process listens there.
        """
        listener = _listener(self._host, port, patience_s)
        self._ranks_store = serve_store(0, self._host)  # for the ranks of all rounds: any node may be lost
        self.address = f"{self._host}:{listener.getsockname()[1]}"
        document = {**self._session.document(), "grace_s": self._grace_s, "record": _record(self._run)}
        document["store_port"] = self._ranks_store.port
        self._connections = NodeConnections(listener, self._secret.text, document)

    def run(self, why_none_comes: Callable[[], str] = str) -> int:
        """Return the exit code, once no round will follow.

        Args:
            why_none_comes: returns why no further node will come; "" while one may.
        """
        self._why_none_comes = why_none_comes
        self._print_address()
        while self._plan.over is None:
            self._receive()
            self._advance()
            time.sleep(_POLL_S)
        until = min(time.monotonic() + _GOODBYE_S, (self._stop_by or math.inf) - _CANCEL_S)
        while self._rounds.present() and time.monotonic() < until:
            self._receive()
            time.sleep(_POLL_S)
        return self._plan.over

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Have all ranks take a snapshot and leave; a handler of signals."""
        self._stop_by = self._stop_by or time.monotonic() + self._grace_s

    def snapshot(self, number: int, frame: FrameType | None) -> None:
        """Have the ranks take a snapshot; a handler of signals."""
        self._snapshots += 1

    def _print_address(self) -> None:
        machines = self._rounds.machines
        host = self.address.rpartition(":")[0]
        if is_loopback(found := socket.gethostbyname(host)):
            where = host if host == found else f"{host}, here {found},"
            print(
                f"only this machine reaches {where}: for others, set rendezvous to its address on their network",
                flush=True,
            )
        wanted = f"{machines.least}" if machines.least == machines.most else f"{machines.least} to {machines.most}"
        print(f"waiting for nodes, {wanted} of them{self._way_in(' on each')}", flush=True)

    def _way_in(self, where: str) -> str:
        """Return how a person starts a node; "" if a cluster starts them."""
        if self._run.job.world.on != "join":
            return f" from {self._run.job.world.on}"
        return f": run midstride join {self.address}{self._secret.option}{where}{self._secret.remark}"

    # Messages of nodes --------------------------------------------------------------------------------

    def _receive(self) -> None:
        """Add the nodes that have joined, and handle the messages of all nodes."""
        for number, message in self._connections.receive():
            if number in self._rounds.nodes:
                self._handle(self._rounds.nodes[number], message)
            else:
                self._rounds.add(number, message["host"], message["cores"])

    def _handle(self, node: Node, message: dict[str, Any]) -> None:
        for line in message.get("lines", ()):
            print(f"{node.host}: {line}", flush=True)
        if node in self._rounds.members and message.get("round") == self._rounds.number:
            self._write_report(message)
        if refused := message.get("refused"):
            self._refuse(refused)
        # A member that waits as it has not yet heard of the round has not ended its ranks: it has none.
        is_member = node in self._rounds.members
        waits = message.get("waits", False) and not (is_member and message["heard"] < self._rounds.number)
        is_done = waits and is_member and self._is_done(node)
        left, stacks = message.get("left", ""), message.get("stacks", 0)
        self._rounds.update(node, waits=waits, is_done=is_done, left=left, stacks=stacks)

    def _is_done(self, node: Node) -> bool:
        done = {outcome.rank for outcome in self._session.outcomes() if outcome.kind == "done"}
        return done.issuperset(self._rounds.ranks(node))

    def _write_report(self, message: dict[str, Any]) -> None:
        for rank, reading in message["heartbeats"].items():
            reading["phase"] = Phase(reading["phase"])
            heartbeat = HeartbeatReading(**reading)
            heartbeat.write(self._session.heartbeat(int(rank)))
        for kind, at, fields in message["events"]:
            self._log.write(Event(kind, at, fields))
            if kind == "step":
                self._rounds.note_first_step()
        for outcome in message["outcomes"]:
            self._session.write_outcome(Outcome.from_json(outcome))

    def _refuse(self, why: str) -> None:
        """Print why a node cannot take part; before the first round, end with an error of the job."""
        print(why, flush=True)
        if self._rounds.number == 0:
            self._finish(Outcome.of(JobError(why)))

    # Decisions ----------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Decide the next step by requests and nodes' reports, and publish it."""
        if self._plan.over is not None:
            return
        if self._snapshots != self._plan.snapshots:
            self._publish(snapshots=self._snapshots)
        if self._stop_by is not None and not self._plan.stop:
            self._why = "asked to stop"
            self._publish(stop=True, end="stop")
        if self._stop_by is not None and time.monotonic() > self._stop_by - _CANCEL_S:
            late = f"asked to stop, and not all nodes have left within the grace of {self._grace_s:g} s"
            self._finish(Outcome.of(StopRequested(late)))
        elif self._rounds.members:
            self._watch()
        elif self._plan.stop:
            self._finish(Outcome.of(StopRequested("asked to stop while no node trained")))
        elif self._rounds.begin():
            self._begin()
        else:
            self._wait_for_nodes()

    def _wait_for_nodes(self) -> None:
        if (why := self._why_none_comes()) and not self._rounds.present():
            self._session.begin_round(1)  # whose end it is: that of the round before was followed by a wait
            self._finish(Outcome.of(WorldError(why)))
            return
        self._print_missing_nodes()
        if self._run.job.world.on != "join":  # its queue may be long: that is no hang
            HeartbeatReading(phase=Phase.WAITING).write(self._session.heartbeat(0))

    def _print_missing_nodes(self) -> None:
        """Print, after a round, how many nodes are missing: a person may have to start another."""
        here, least = len(self._rounds.present()), self._rounds.machines.usable[0]
        missing = least - here if self._rounds.number else 0
        if missing > 0 and missing != self._missing:
            way_in = self._way_in(" on another")
            print(f"waiting for nodes: {here} of the required {least} have joined{way_in}", flush=True)
        self._missing = missing

    def _watch(self) -> None:
        self._watch_progress()
        if (end := self._rounds.end()) is not None and self._plan.end != "kill":
            how, why = end
            self._why = self._why or why
            if how != self._plan.end:
                self._publish(end=how)
        if self._plan.end and self._rounds.have_left():
            self._close()

    def _watch_progress(self) -> None:
        """Have the ranks of a hung round write their stacks, then end the round.

        Ranks that hang when the round is to end are ended by their nodes.
        """
        if not self._plan.end and (hang := self._watchdog.look()) is not None:
            self._why = hang.message(self._rank_name)
            self._publish(stacks=self._plan.stacks + 1)
        if self._watchdog.hang is None or self._plan.end == "kill":
            return
        if self._rounds.have_written_stacks(self._plan.stacks) or self._watchdog.stacks_are_late():
            outcome = Outcome.of(WorldError(self._why), step=self._watchdog.step())
            for rank in range(self._session.ranks or 0):  # as they cannot
                self._session.write_outcome(replace(outcome, rank=rank))
            self._publish(end="kill")

    def _rank_name(self, rank: int) -> str:
        return f"rank {rank} on node {self._rounds.member_of(rank).host}"

    def _begin(self) -> None:
        members, number = self._rounds.members, self._rounds.number
        ranks = sum(len(self._rounds.ranks(node)) for node in members)
        why = self._why or ("" if number == 1 else "enough nodes are here again")
        self._session.begin_round(ranks)
        self._watchdog = RoundWatchdog(self._session, self._run.job.world)
        self._why = ""
        hosts = [node.host for node in members]
        self._log.begin(number, hosts, ranks, why)
        print(
            f"round {number}: {', '.join(hosts)}, {format_count(ranks, 'rank')}{f' ({why})' if why else ''}",
            flush=True,
        )
        threads = max(1, min(node.cores for node in members) // self._rounds.machines.processes)
        self._publish(round=number, nodes=tuple(node.number for node in members), threads=threads, end="")

    def _close(self) -> None:
        """Record how the round ended; end the run unless another round makes sense."""
        rounds = self._rounds
        lost = [node for node in rounds.members if not node.is_ready and not node.left]
        for node in lost:  # it may have become silent since this look asked why the round ends
            self._why = self._why or f"{rounds.silence_message(node)}: it is left out"
            self._write_outcomes_of(node)
        ranks = rounds.ranks(rounds.members[-1]).stop
        outcome = decide(self._session.outcomes(), 1, ranks)
        self._log.close(outcome)
        self._why = self._why or cause_of(outcome.error) or outcome.kind
        if outcome.kind == "died":
            for node in lost[:1] or self._failed_nodes(outcome):
                self._count_failure(node)
        rounds.close()
        if not self._plan.stop and self._log.verdict().retry:
            print(f"round {rounds.number} has ended: {self._why}", flush=True)
        else:
            self._finish(outcome)

    def _failed_nodes(self, outcome: Outcome) -> list[Node]:
        """Return the nodes whose ranks ended this round by a hang or an error.

        None if a store failed.
        """
        if (hang := self._watchdog.hang) is not None:
            return [node for node in self._rounds.members if {*self._rounds.ranks(node)} & {*hang.ranks}]
        return [] if outcome.type.startswith("midstride.") else [self._rounds.member_of(outcome.rank)]

    def _write_outcomes_of(self, node: Node) -> None:
        """Write the outcomes of the ranks of a silent node, which can write none."""
        error = WorldError(self._rounds.silence_message(node))
        ended = time.time() - self._rounds.silence_s(node)  # what the others say follows from it
        for rank in self._rounds.ranks(node):
            self._session.write_outcome(replace(Outcome.of(error, rank=rank), time=ended))

    def _count_failure(self, node: Node) -> None:
        self._rounds.count_failure(node)
        if self._rounds.fails_too_often(node):
            self._why += f"; {self._rounds.failure_message(node)}"

    def _finish(self, outcome: Outcome) -> None:
        """Tell all nodes that no round follows; `outcome` counts if no rank has written one."""
        if not self._session.outcomes():
            self._session.begin_round(1)
            self._session.write_outcome(outcome)
        gone = parent_of(os.getppid()) != self._launcher
        # If the launcher has gone, another one will come: the nodes wait for it.
        self._publish(over=WorldError.exit_code if gone else outcome.code)

    def _publish(self, **changes: Any) -> None:
        """Publish the plan with `changes`."""
        self._plan = replace(self._plan, **changes)
        self._connections.publish(self._plan)


def _record(run: Run) -> str:
    """Return a fact that only the run's store tells a node: the newest attempt's start."""
    return repr(max(attempt.started for attempt in run.attempts.attempts()))


def _listener(host: str, port: int, patience_s: float) -> socket.socket:
    """Return a socket that listens there, once no other process does."""
    until = time.monotonic() + patience_s
    while True:
        try:
            return socket.create_server((host, port), backlog=1024)
        except OSError as error:
            why = f"world.rendezvous: nothing can be served at {host}:{port}: {error.strerror or error}"
            if error.errno != errno.EADDRINUSE:
                way_out = "use a name or an address of this machine that nodes can reach"
                raise JobError(f"{why}: {way_out}") from error
            if time.monotonic() > until:
                raise WorldError(f"{why}: choose another port, or end what listens there") from error
            time.sleep(_POLL_S)


def main() -> None:
    """Serve the nodes of the session that the command line names, until its world ends."""
    tie_to_parent()
    print_whole_lines()
    session, grace_s = Session(sys.argv[1]), float(sys.argv[2])
    run = Run.from_document(session.document())
    try:
        host, _, port = (run.job.world.rendezvous or f"{own_address()}:0").rpartition(":")
        secret = RunSecret.of(run)
        server = NodeServer(session, run, host, secret, grace_s)
        server.listen(int(port), patience_s=grace_s + _GOODBYE_S)  # for an earlier attempt on its way out
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, server.stop)
        signal.signal(signal.SIGUSR1, server.snapshot)
        with NodeJobs(build_cluster(run, grace_s), server.address, secret.text) as jobs:
            code = server.run(jobs.end_reason)
        if code == 0:
            secret.forget()
        sys.exit(code)
    except EngineError as error:
        session.begin_round(1)
        session.write_outcome(Outcome.of(error))
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
