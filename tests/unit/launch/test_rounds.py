"""Rounds: which nodes train together, told by a clock that is moved by hand."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from support.flow_runs import tiny_job

from midstride.engine.config.world import WorldOptions
from midstride.engine.launch import watchdog
from midstride.engine.launch.machines.rounds import Node, Rounds
from midstride.engine.launch.machines.secret import RunSecret
from midstride.engine.launch.machines.server import NodeServer
from midstride.engine.runs.run import Run
from midstride.engine.session.session import Session

pytestmark = pytest.mark.fast


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def pass_s(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def rounds_of(clock: Clock, **chosen: Any) -> Rounds:
    world = {"nodes": "1:4", "strategy": "ddp", "lanes": 8, "processes": 2, "rendezvous": "head:1", **chosen}
    return Rounds(WorldOptions.model_validate(world), clock)


def come(rounds: Rounds, *hosts: str) -> list[Node]:
    for host in hosts:
        rounds.add(len(rounds.nodes) + 1, host, 8)
    nodes = [*rounds.nodes.values()][-len(hosts) :]
    for node in nodes:
        rounds.update(node, waits=True)
    return nodes


def pass_s(rounds: Rounds, clock: Clock, seconds: float, *heard: Node) -> None:
    """Let time pass in which something is heard of some nodes."""
    clock.pass_s(seconds)
    for node in heard:
        rounds.update(node)


def hosts(rounds: Rounds) -> list[str]:
    return [node.host for node in rounds.members]


def test_the_first_round_gives_others_a_moment_to_come(clock: Clock) -> None:
    rounds = rounds_of(clock)
    assert not rounds.begin()
    [one] = come(rounds, "a")
    assert not rounds.begin()
    pass_s(rounds, clock, 4.0, one)
    [two] = come(rounds, "b")
    pass_s(rounds, clock, 4.0, one, two)
    assert not rounds.begin()
    pass_s(rounds, clock, 2.0, one, two)
    assert rounds.begin()
    assert hosts(rounds) == ["a", "b"]
    assert [rounds.describe(node) for node in rounds.members] == ["node a (ranks 0 to 1)", "node b (ranks 2 to 3)"]


def test_as_many_as_there_may_be_begin_at_once(clock: Clock) -> None:
    rounds = rounds_of(clock)
    come(rounds, *"abcd")
    assert rounds.begin()
    assert hosts(rounds) == [*"abcd"]


def test_a_number_that_cannot_share_the_lanes_leaves_one_waiting(clock: Clock) -> None:
    rounds = rounds_of(clock, nodes="1:3", grow_after_s=0)
    come(rounds, *"abc")
    assert rounds.begin()
    assert hosts(rounds) == ["a", "b"]
    rounds.note_first_step()
    assert rounds.end() is None  # three can do no more than two


def test_a_waiting_node_replaces_a_silent_one(clock: Clock) -> None:
    rounds = rounds_of(clock, nodes="1:2", node_timeout_s=5)
    one, two, spare = come(rounds, *"abc")
    assert rounds.begin()
    pass_s(rounds, clock, 5.0, two, spare)
    assert rounds.end() is None
    pass_s(rounds, clock, 0.1, two, spare)
    assert rounds.end() == ("kill", "node a (ranks 0 to 1) was silent for 5 s: it is left out")
    assert not rounds.have_left()
    rounds.update(two, waits=True)
    assert rounds.have_left()
    rounds.close()
    assert rounds.begin()
    assert hosts(rounds) == ["b", "c"]
    rounds.update(one, waits=True)  # its cable is back: it waits, as there are two
    rounds.note_first_step()
    assert rounds.end() is None
    rounds.update(spare, left="asked to stop")
    assert rounds.end() == ("stop", "node c (ranks 2 to 3) leaves: asked to stop")


def test_nodes_suspended_with_the_launcher_are_not_silent(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=clock))
    rounds = Rounds(rounds_of(clock, nodes="1:2", node_timeout_s=5)._options)
    one, two = come(rounds, "a", "b")
    assert rounds.begin()
    pass_s(rounds, clock, 1e6)
    assert rounds.end() is None
    for _ in range(4):  # from then on only one of them is heard of
        pass_s(rounds, clock, 1.0, one)
        silent = rounds.end()
    assert silent == ("kill", "node b (ranks 2 to 3) was silent for 5 s: it is left out")
    assert rounds.present() == [one] != [two]


def test_ranks_that_have_ended_say_why_themselves(clock: Clock) -> None:
    rounds = rounds_of(clock, nodes="2", lanes=None)
    one, two = come(rounds, *"ab")
    assert rounds.begin()
    rounds.update(two, waits=True)
    assert rounds.end() == ("stop", "")
    rounds.update(one, waits=True)
    rounds.close()
    assert rounds.begin()
    assert hosts(rounds) == ["a", "b"]
    assert rounds.end() is None
    rounds.update(one, left="asked to stop")
    rounds.update(two, waits=True)
    rounds.close()
    assert not rounds.begin()  # it needs two


def test_a_round_grows_when_it_has_trained_for_a_while(clock: Clock) -> None:
    rounds = rounds_of(clock, nodes="1:2", grow_after_s=60)
    [one] = come(rounds, "a")
    pass_s(rounds, clock, 5.0, one)
    assert rounds.begin()
    [two] = come(rounds, "b")
    pass_s(rounds, clock, 100.0, one, two)
    assert rounds.end() is None  # it has not trained: there would be nothing to keep
    rounds.note_first_step()
    pass_s(rounds, clock, 59.0, one, two)
    rounds.note_first_step()
    assert rounds.end() is None
    pass_s(rounds, clock, 1.0, one, two)
    assert rounds.end() == ("stop", "b can train as well")


def test_a_round_never_grows_where_the_job_says_so(clock: Clock) -> None:
    rounds = rounds_of(clock, nodes="1:2", grow_after_s=None)
    [one] = come(rounds, "a")
    pass_s(rounds, clock, 5.0, one)
    assert rounds.begin()
    rounds.note_first_step()
    [two] = come(rounds, "b")
    pass_s(rounds, clock, 1e6, one, two)
    assert rounds.end() is None


def test_ranks_that_are_done_let_the_others_come_to_the_end_too(clock: Clock) -> None:
    rounds = rounds_of(clock, nodes="1:2")
    one, two = come(rounds, *"ab")
    assert rounds.begin()
    rounds.update(one, waits=True, is_done=True)
    assert rounds.end() is None
    rounds.update(two, waits=True, is_done=True)
    assert rounds.end() == ("stop", "")


def test_a_node_lost_after_another_is_done_costs_a_round(clock: Clock) -> None:
    rounds = rounds_of(clock, nodes="1:2", node_timeout_s=5)
    one, _ = come(rounds, *"ab")
    assert rounds.begin()
    pass_s(rounds, clock, 5.1, one)
    rounds.update(one, waits=True, is_done=True)
    assert rounds.end() == ("kill", "node b (ranks 2 to 3) was silent for 5 s: it is left out")
    rounds.close()
    assert rounds.begin()
    assert hosts(rounds) == ["a"]


def test_a_node_that_ended_two_rounds_waits_if_others_suffice(clock: Clock) -> None:
    rounds = rounds_of(clock, nodes="1:2", grow_after_s=0)
    one, two = come(rounds, *"ab")
    for last in (False, True):
        assert rounds.begin()
        assert hosts(rounds) == ["a", "b"]
        rounds.count_failure(rounds.member_of(3))
        assert rounds.fails_too_often(two) == last
        rounds.update(one, waits=True)
        rounds.update(two, waits=True)
        rounds.close()
    assert rounds.failure_message(two) == "node b has ended 2 of the last 10 rounds: it waits while others are enough"
    assert rounds.begin()
    assert hosts(rounds) == ["a"]
    rounds.note_first_step()
    assert rounds.end() is None, "it is not let in"
    rounds.update(one, left="asked to stop")
    rounds.close()
    assert rounds.begin(), "there is no other"
    assert hosts(rounds) == ["b"]
    rounds.close()
    for _ in range(7):
        rounds.update(two, waits=True)
        assert rounds.begin()
        rounds.close()
    assert not rounds.fails_too_often(two), "it has done well since"


@pytest.mark.parametrize("reads", range(12))
def test_a_round_ends_by_a_silent_node_at_whichever_look_at_the_clock(reads: int, tmp_path: Path) -> None:
    """The ranks of the other one have ended by then. Time passes between two looks, too."""
    rounds = rounds_of(Clock(), nodes="1:2", processes=1, node_timeout_s=5)
    run = Run(tiny_job(tmp_path).model_copy(update={"world": rounds._options}), "a")
    server = NodeServer(Session.create(run.document(1, 1.0)), run, "127.0.0.1", RunSecret("secret"), 5.0)
    server._connections, server._rounds = Mock(), rounds
    come(rounds, "a", "b")
    server._advance()
    rounds._clock = lambda: 100.0
    rounds.update(rounds.members[0], waits=True)
    ticks = iter([0.0] * reads)
    rounds._clock = lambda: next(ticks, 100.0)
    while rounds.members:
        server._watch()
    assert server._why == "node b (rank 1) was silent for 5 s: it is left out"
