"""Laws of what plugs in: inherit the class, say what is tried, and pytest has the tests. Needs pytest.

launcher        what every launcher keeps: one process a rank, deaths that are noticed, runs that resume
small_training  a small training with what is easily lost: dropout, momentum, a schedule, a shuffled loader
store           what every store keeps: whole files, one winner of `create`, folders that appear and go
strategy        what every strategy keeps: the bits of an undisturbed run, each sample once, values of all
                ranks
"""

from midstride.engine.testing.laws.launcher import LauncherLaws
from midstride.engine.testing.laws.store import StoreLaws
from midstride.engine.testing.laws.strategy import StrategyLaws

__all__ = ["LauncherLaws", "StoreLaws", "StrategyLaws"]
