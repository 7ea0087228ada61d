"""Tests that every launcher passes."""

from pathlib import Path
from typing import ClassVar

import pytest

from midstride.engine.config.job import TrainingJob
from midstride.engine.fault_injection import FaultPlan
from midstride.engine.jobs.build import build_data, build_module, build_trainer
from midstride.engine.launch.launch import launch
from midstride.engine.processes.lifetime import processes_with_env
from midstride.engine.runs.run import Run
from midstride.engine.seeds import seed_everything
from midstride.engine.session.attempts import AttemptLog
from midstride.engine.storage.store import Store
from midstride.engine.testing.laws.small_training import EPOCHS, STEPS
from midstride.engine.testing.laws.strategy import assert_same_bits
from midstride.engine.testing.ranks import run_ranks

__all__ = ["LauncherLaws"]

SMALL = "midstride.engine.testing.laws.small_training"


class LauncherLaws:
    """Tests of a launcher, on this machine.

    class TestMine(LauncherLaws):
        launcher = "mine"
    """

    #: as a job's `world.launcher` names it
    launcher: ClassVar[str]
    #: processes of a world
    ranks: ClassVar[int] = 2

    def test_a_run_that_lost_a_rank_is_resumed_to_the_bits_of_an_undisturbed_one(self, tmp_path: Path) -> None:
        """The world of a killed rank ends completely and is recorded. A relaunch resumes.

        The undisturbed run needs no launcher: the way ranks are started changes no bit of a run.
        """
        job = self._job(tmp_path)
        assert run_ranks(_train, job, "whole", processes=self.ranks) == [0] * self.ranks
        plan = FaultPlan(tmp_path).add("kill", rank=self.ranks - 1, step=STEPS // 2 + 1, phase="forward")
        with pytest.MonkeyPatch.context() as patch:
            for name, value in plan.environment.items():
                patch.setenv(name, value)
            outcome = launch(Run(job, "killed"))
        assert outcome.kind == "died", outcome
        plan.assert_all_fired()
        assert not any(processes_with_env(name, value) for name, value in plan.environment.items()), (
            "its world left processes"
        )
        assert launch(Run(job, "killed")).kind == "done"
        assert_same_bits(job.run_url("killed"), job.run_url("whole"))
        attempts = AttemptLog(Store.open(job.run_url("killed"))).attempts()
        assert [attempt.outcome for attempt in attempts] == ["died", "done"]

    def _job(self, folder: Path) -> TrainingJob:
        document = {
            "name": "small",
            "module": f"{SMALL}:SmallModule",
            "data": f"{SMALL}:SmallData",
            "data_args": {"ranks": self.ranks},
            "world": {"strategy": "ddp", "processes": self.ranks, "launcher": self.launcher},
            "trainer": {"max_epochs": EPOCHS},
            "snapshots": {"url": str(folder), "every_steps": 1},
            "folder": str(folder),
        }
        return TrainingJob.model_validate(document)


def _train(job: TrainingJob, run: str) -> None:
    seed_everything(job.seed)
    module, data = build_module(job), build_data(job)
    build_trainer(job).fit(module, data, run=job.run_url(run))
