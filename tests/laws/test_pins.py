"""Law of pins: no fork is left without its snapshot, however its making and a pruning interleave."""

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from support.snapshot_files import Killed
from support.snapshot_writers import alone, save_weights, state_at, take

from midstride.engine.errors import SnapshotDamaged, SnapshotMissing
from midstride.engine.snapshots.catalog import SnapshotCatalog
from midstride.engine.snapshots.forks import Pins, fork, snapshot_at
from midstride.engine.snapshots.lease import lease_path, newest
from midstride.engine.snapshots.parent import PARENT, open_run
from midstride.engine.snapshots.reader import load_weights, read
from midstride.engine.snapshots.schedule import Retention
from midstride.engine.state.differences import differences
from midstride.engine.storage.local import LocalStore
from midstride.engine.storage.store import Store

#: each is one operation; what they call belongs to them
_VERBS = ("list", "find", "read", "size", "write", "create", "remove", "remove_known", "exists")
_MOST = 60


class Turns:
    """Two threads that use a store in turns.

    Args:
        turns: name of the thread that makes the next operation; who has ended is left out.
        kill: thread and operation before which it dies.
    """

    def __init__(self, turns: list[str], kill: tuple[str, int] = ("", 0)) -> None:
        self._turns, self._kill, self._changed = turns, kill, threading.Condition()
        self._inside, self._ended, self.made = threading.local(), set[str](), dict[str, int]()

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        for verb in _VERBS:
            patch.setattr(LocalStore, verb, self._in_turn(getattr(LocalStore, verb)))

    def _in_turn(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def acting(*given: Any, **named: Any) -> Any:
            name = threading.current_thread().name
            if name not in self._turns or getattr(self._inside, "yes", False):
                return act(*given, **named)
            with self._changed:
                assert self._changed.wait_for(lambda: self._next() == name, 60)
            if self._kill == (name, self.made.get(name, 0)):
                raise Killed
            self._inside.yes = True
            try:
                return act(*given, **named)
            finally:
                self._inside.yes = False
                with self._changed:
                    self._turns.remove(name)
                    self.made[name] = self.made.get(name, 0) + 1
                    self._changed.notify_all()

        return acting

    def _next(self) -> str:
        return next(name for name in self._turns if name not in self._ended)

    def run(self, **acts: Callable[[], object]) -> dict[str, BaseException | None]:
        """Run the functions by name; return their errors."""
        raised: dict[str, BaseException | None] = {}

        def run(name: str) -> None:
            try:
                acts[name]()
                raised[name] = None
            except BaseException as error:
                raised[name] = error
            with self._changed:
                self._ended.add(name)
                self._changed.notify_all()

        threads = [threading.Thread(target=run, args=(name,), name=name) for name in acts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return raised


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of runs in which `a` keeps snapshots of steps 1 to 3."""
    runs = tmp_path_factory.mktemp("pins") / "runs"
    train(Store.open(str(runs / "a")), None, 1, 2, 3)
    return runs


def train(store: Store, resumed_from: str | None, *steps: int) -> None:
    """Let one more attempt take snapshots at `steps`."""
    writer = alone(store, resumed_from)
    take(writer, *steps)
    writer.close()


def by_command(runs: Path) -> None:
    store = open_run(str(runs / "a"))
    pins = Pins(store)
    SnapshotCatalog(store).prune(1, also=[*pins.read()], pins=pins.read)


def by_training(runs: Path) -> None:
    store = open_run(str(runs / "a"))
    lease, catalog = newest(store), SnapshotCatalog(store)
    assert lease is not None
    Retention(store, lease, keep=1).add(catalog.snapshots()[-1], rows="")


PRUNINGS = {"by a command": by_command, "by training": by_training}


def schedules() -> Iterator[tuple[str, int, int, tuple[str, int]]]:
    """Yield who begins, the operations of that one and of the other before both end, and who is killed where.

    The first two have no interruption.
    """
    roles = (("fork", "prune"), ("prune", "fork"))
    for first, _ in roles:
        yield first, _MOST, 0, ("", 0)
    for first, other in roles:
        for i, j in product(range(_MOST), range(_MOST)):
            yield first, i, j, ("", 0)
            if i == j:
                yield first, i, j, (first, i)
                yield first, i, j, (other, j + 1)


@pytest.mark.parametrize("pruning", PRUNINGS)
def test_no_fork_is_left_without_its_snapshot(
    pruning: str, template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    everything = request.config.getoption("--laws") == "all"
    seen: dict[tuple[str, str], int] = {}
    longest = {"fork": 0, "prune": 0}
    for number, (first, i, j, kill) in enumerate(schedules()):
        other = "prune" if first == "fork" else "fork"
        if number > 1 and (i > longest[first] or j > longest[other] or not (everything or number % 7 == 0)):
            continue
        turns = [first] * i + [other] * j + [first] * _MOST + [other] * _MOST
        runs = tmp_path / str(number)
        shutil.copytree(template, runs)
        stage = Turns([*turns], kill)

        def forking(runs: Path = runs) -> None:
            source = open_run(str(runs / "a"))
            fork(source, snapshot_at(source, 2), Store.open(str(runs / "b")))

        def removing(runs: Path = runs) -> None:
            PRUNINGS[pruning](runs)

        with monkeypatch.context() as patch:
            stage.patch(patch)
            raised = stage.run(fork=forking, prune=removing)
        if not kill[0]:
            longest = {name: max(longest[name], stage.made[name]) for name in longest}
        for name, error in raised.items():
            assert error is None or isinstance(error, Killed | SnapshotMissing | SnapshotDamaged), (turns, error)
            assert error is None or name == "fork" or isinstance(error, Killed), (turns, error)
        with suppress(SnapshotMissing):
            PRUNINGS[pruning](runs)  # a later one
        parent = open_run(str(runs / "a"))
        assert [*map(str, range(1, 4))] == [rows.partition(",")[0] for rows in SnapshotCatalog(parent).rows()]
        is_there = (runs / "b" / PARENT).exists()
        assert is_there >= (raised["fork"] is None)
        if is_there:
            child = open_run(str(runs / "b"))
            good = SnapshotCatalog(child).newest_good()
            assert good is not None, (turns, kill, raised)
            assert not differences(read(child, good, 0), state_at(2))
        outcome = str(is_there), type(raised["prune"]).__name__
        seen[outcome] = seen.get(outcome, 0) + 1
        shutil.rmtree(runs)
    print(seen, longest)
    assert {outcome[0] for outcome in seen} == {"True", "False"}, seen


def test_weights_of_a_superseded_attempt_stay_for_a_fork(template: Path, tmp_path: Path) -> None:
    runs = shutil.copytree(template, tmp_path / "runs")
    parent = open_run(str(runs / "a"))
    for step in (2, 3):
        save_weights(parent, "best", state_at(step)["module"], {"step": step})
    first, last = snapshot_at(parent, 1), snapshot_at(parent, 3)
    fork(parent, last, Store.open(str(runs / "b")))
    train(parent, first.name, 2)
    child = open_run(str(runs / "b"))
    assert not differences(load_weights(child, "best").state_dict, state_at(3)["module"])
    with pytest.raises(SnapshotMissing, match="has resumed from a snapshot before"):
        fork(parent, last, Store.open(str(runs / "c")))
    fork(child, snapshot_at(child, 2), Store.open(str(runs / "d")))  # of a fork, which still has it
    shutil.rmtree(runs / "b")
    shutil.rmtree(runs / "d")
    train(parent, snapshot_at(parent, 2).name, 3)
    assert not [*(runs / "a/best").iterdir()]


def test_no_weights_go_while_a_fork_cannot_tell_which_it_needs(
    template: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The lease of a pinned snapshot is damaged, after a later attempt has superseded it."""
    runs = shutil.copytree(template, tmp_path / "runs")
    parent = open_run(str(runs / "a"))
    first = snapshot_at(parent, 1).name
    train(parent, first, 2)
    second = snapshot_at(parent, 2)
    save_weights(parent, "best", state_at(2)["module"], {"step": 2})
    fork(parent, second, Store.open(str(runs / "b")))
    writer = alone(parent, first)
    Path(runs, "a", lease_path(second.generation)).write_text("{")
    take(writer, 2)
    writer.close()
    assert [*(runs / "a/best").iterdir()]
    assert not caplog.messages  # pruning goes on
