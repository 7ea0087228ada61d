"""A run that a process on another machine trains is not taken from it by accident."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.flow_runs import tiny_job, wait_for
from torch import nn

from midstride.engine import Loop
from midstride.engine.errors import RunHeld
from midstride.engine.launch.launch import launch
from midstride.engine.processes.process_identity import process_identity
from midstride.engine.runs.run import Run
from midstride.engine.snapshots import beat
from midstride.engine.snapshots.beat import BEAT, beating, ensure_none_elsewhere
from midstride.engine.storage.store import Store

ELSEWHERE = {**process_identity(), "host": "other", "boot": "another"}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    for name, value in {"_EVERY_S": 0.01, "_POLL_S": 0.01, "_WATCHED_S": 60.0}.items():
        monkeypatch.setattr(beat, name, value)
    return Store.open(tmp_path / "runs" / "a")


@contextmanager
def beating_as(who: dict[str, Any], store: Store, patch: pytest.MonkeyPatch) -> Iterator[None]:
    with ExitStack() as stack:
        with patch.context() as inner:
            inner.setattr(beat, "process_identity", lambda: who)
            stack.enter_context(beating(store))
            wait_for(lambda: store.exists(BEAT), "a sign of life")
        yield


def test_a_launcher_elsewhere_holds_its_run(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    run = Run(tiny_job(tmp_path, processes=1), "a")
    held = pytest.raises(RunHeld, match=r"process \d+ on other trains .*/a\. .*--take-over")
    with beating_as(ELSEWHERE, store, monkeypatch), held:
        launch(run, on_line=said.append)
    assert run.attempts.attempts() == []
    assert len(said) == 1
    assert said[0].startswith("other trained ")
    assert not store.exists(BEAT), "its sign of life has gone with it"
    ensure_none_elsewhere(store, pytest.fail, pytest.fail)


def a_loop(store: Store) -> tuple[Loop, Iterator[int]]:
    loop = Loop(store.url, enable_progress_bar=False)
    loop.keep(model=nn.Linear(1, 1))
    return loop, loop.steps(1)


def test_a_script_gives_signs_too(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, steps = a_loop(store)
    for _ in steps:
        wait_for(lambda: store.exists(BEAT), "a sign of life")
    loop.close()
    assert not store.exists(BEAT), "it has gone with the run"
    with beating_as(ELSEWHERE, store, monkeypatch):
        loop, steps = a_loop(store)
        with pytest.raises(RunHeld, match=r"process \d+ on other trains .*/a\. .*take_over=True"):
            next(steps)
        loop.close()


def test_a_launcher_of_this_machine_is_looked_at_otherwise(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with beating_as(process_identity(), store, monkeypatch):
        ensure_none_elsewhere(store, pytest.fail, pytest.fail)


#: what is found of a launcher elsewhere: the limit that is over by then
FOUND = {"silent": ("_WATCHED_S", 0.05), "old": ("_OLD_S", 0.0), "ended": None, "damaged": None}


@pytest.mark.parametrize("case", FOUND)
def test_a_launcher_that_gives_no_sign_holds_nothing(case: str, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    with beating_as(ELSEWHERE, store, monkeypatch):
        left = store.read(BEAT)
    store.write(BEAT, b"{}" if case == "damaged" else left)
    if (limit := FOUND[case]) is not None:
        monkeypatch.setattr(beat, limit[0], limit[1])
    ensure_none_elsewhere(store, said.append, lambda: store.remove(BEAT) if case == "ended" else None)
    assert len(said) == (case in ("silent", "ended"))


def test_a_request_to_stop_ends_the_watch(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    with beating_as(ELSEWHERE, store, monkeypatch), pytest.raises(KeyboardInterrupt):
        ensure_none_elsewhere(store, lambda _: None, stop)


def test_a_store_that_takes_nothing_ends_no_launcher(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def refuse(path: str, data: object) -> None:
        tried.append(path)
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(store, "write", refuse)
    with beating(store):
        wait_for(lambda: len(tried) > 1, "two tries")
    assert set(tried) == {BEAT}
