"""Warnings of all ranks: which are merged, and what becomes of them where a rank fails."""

import logging
from threading import Thread
from typing import Any

import pytest

from midstride.engine.checkpointing.rank_warnings import RankWarnings
from midstride.engine.objects import object_state
from midstride.engine.world import World


def test_a_rank_that_fails_says_its_own(caplog: pytest.LogCaptureFixture) -> None:
    def gather(value: object) -> list[Any]:
        raise AssertionError("the other ranks do not come")

    def fail() -> None:
        object_state.log.warning("a lock")
        raise OSError

    with pytest.raises(OSError), RankWarnings(World(0, 2), gather).merge_ranks():
        fail()

    assert caplog.messages == ["a lock"]
    object_state.log.warning("another")
    assert caplog.messages == ["a lock", "another"]


def test_warnings_of_state_are_merged_and_of_this_thread_alone(caplog: pytest.LogCaptureFixture) -> None:
    engine, store = (logging.getLogger(f"midstride.engine.{name}") for name in ("objects.any", "storage.any"))
    caplog.set_level(logging.INFO)
    with RankWarnings(World(0, 2), lambda own: [own, []]).merge_ranks():
        engine.warning("a lock")
        engine.info("said at once")
        store.warning("does not answer")  # now, and not when it has
        other = Thread(target=engine.warning, args=["of a writer"])
        other.start()
        other.join()
    assert caplog.messages == ["said at once", "does not answer", "of a writer", "a lock (on rank 0)"]
