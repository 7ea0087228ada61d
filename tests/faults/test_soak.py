"""A short soak: five kills at random points of one run. `make soak` does more of them to a real example."""

from collections.abc import Callable
from pathlib import Path

from laws.lives import STEPS, Setting, assert_alike, live
from soak.soak import random_kills


def test_a_run_killed_again_and_again_ends_with_the_same_bits(
    tmp_path: Path, undisturbed: Callable[[Setting], Path]
) -> None:
    setting = Setting(ranks=3, layout="every step")
    plan = random_kills(tmp_path / "plan", seed=0, kills=5, ranks=3, steps=STEPS)
    while (codes := live(setting, tmp_path, plan)) != [0, 0, 0]:
        assert -9 in codes
    plan.assert_all_fired()
    assert_alike(tmp_path, undisturbed(setting))
