"""Tests for authors of launchers, stores and strategies, to derive from. They need pytest.

launcher        tests of a launcher: one process per rank, deaths that are noticed, runs that resume
small_training  a small training with state that is easily lost: dropout, momentum, a schedule, a shuffled loader
store           tests of a store: atomic writes, one winner of `create`, listing and removal of folders
strategy        tests of a strategy: resumes bit for bit, uses each sample once, ends all ranks together
"""

from midstride.engine.testing.laws.launcher import LauncherLaws
from midstride.engine.testing.laws.store import StoreLaws
from midstride.engine.testing.laws.strategy import StrategyLaws

__all__ = ["LauncherLaws", "StoreLaws", "StrategyLaws"]
