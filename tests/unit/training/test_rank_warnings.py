"""Warnings of unsaved state, where a rank fails."""

from typing import Any

import pytest

from midstride.engine.objects import object_state
from midstride.engine.training.checkpointing.rank_warnings import RankWarnings
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
