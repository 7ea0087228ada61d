"""Tests that every strategy passes."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from midstride.engine.fault_injection import FaultPlan
from midstride.engine.modules.module import TrainingModule
from midstride.engine.runs.audit import audit
from midstride.engine.state.differences import differences
from midstride.engine.storage.store import Store
from midstride.engine.testing.laws.small_training import EPOCHS, STEPS, SmallData, SmallModule
from midstride.engine.testing.ranks import run_ranks
from midstride.engine.testing.resume_check import final_state
from midstride.engine.training.trainer import Trainer

__all__ = ["StrategyLaws", "assert_same_bits"]


class StrategyLaws:
    """Tests of a strategy. Ranks are forks of a process that has imported torch.

    class TestMine(StrategyLaws):
        options = {"strategy": "my_package.my_strategy:Mine", "strategy_args": {...}}
    """

    #: for the Trainer
    options: ClassVar[Mapping[str, Any]]
    #: processes; a sum over two of them has no order, over three it has
    ranks: ClassVar[int] = 3
    #: what is trained, for a strategy that needs a module of its own
    module: ClassVar[Callable[[], TrainingModule]] = SmallModule

    def test_a_run_that_was_killed_ends_with_the_bits_of_an_undisturbed_one(self, tmp_path: Path) -> None:
        """A run killed in a backward pass and a validation ends like one that was not.

        State, weights and metrics are equal.

        Each sample of every epoch was used once, and a value that each rank logged is reduced over the ranks.
        """
        whole, killed = tmp_path / "whole", tmp_path / "killed"
        assert self._train_on_ranks(whole) == [0] * self.ranks
        plan = FaultPlan(tmp_path).add("kill", rank=self.ranks - 1, step=2, phase="backward")
        plan.add("kill", rank=0, step=STEPS // EPOCHS, phase="validation")
        for _ in range(2):
            assert -9 in self._train_on_ranks(killed, plan)
        assert self._train_on_ranks(killed, plan) == [0] * self.ranks
        plan.assert_all_fired()
        assert_same_bits(str(killed), str(whole))
        assert audit(str(killed)).is_clean, audit(str(killed))

    def test_an_error_of_one_rank_ends_all(self, tmp_path: Path) -> None:
        """All ranks end with an error if one raises it. None hangs."""
        plan = FaultPlan(tmp_path).add("raise", rank=self.ranks - 1, step=1, phase="forward")
        codes = self._train_on_ranks(tmp_path / "run", plan)
        plan.assert_all_fired()
        assert all(codes), f"ranks ended with {codes}, though one of them failed"

    def _train_on_ranks(self, run: Path, plan: FaultPlan | None = None) -> list[int]:
        environment = {**os.environ, **(plan.environment if plan is not None else {})}
        kind: Any = type(self)  # where its module is no method
        arguments = (kind.module, dict(self.options), self.ranks, str(run))
        return run_ranks(_train, *arguments, processes=self.ranks, environment=environment)


def _train(module: Callable[[], TrainingModule], options: dict[str, Any], ranks: int, run: str) -> None:
    settings: dict[str, Any] = {
        "max_epochs": EPOCHS,
        "snapshots": {"every_steps": 1},
        "enable_progress_bar": False,
        "seed": 7,
    }
    Trainer(**{**settings, **options}).fit(module(), SmallData(ranks), run=run)


def assert_same_bits(found: str, expected: str) -> None:
    """Compare two finished runs: the state of every rank, and every row of metrics.

    Args:
        found: URL of a run.
        expected: URL of the other one.

    Raises:
        AssertionError: they differ; it names where.
    """
    pairs = zip(final_state(found), final_state(expected), strict=True)
    for rank, (ours, theirs) in enumerate(pairs):
        paths = differences(ours, theirs)
        assert not paths, f"rank {rank} of {found} differs from {expected} in {paths}"
    ours, theirs = (Store.open(url).read("metrics.csv").decode() for url in (found, expected))
    assert ours == theirs, f"metrics.csv of {found} differs from that of {expected}"
