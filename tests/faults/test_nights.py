"""Ten nights of one job: good ones, worse ones, and those in which something died."""

import json
import os
from pathlib import Path

import pytest
from support.nightly_job import House

from midstride.engine.config.import_paths import make_importable
from midstride.engine.config.job import TrainingJob
from midstride.engine.errors import Overtaken, UserError
from midstride.engine.fault_injection import FaultPlan
from midstride.engine.jobs.build import build_data, build_module, build_trainer
from midstride.engine.jobs.evaluate import evaluate_with_champion
from midstride.engine.jobs.prepare import prepare
from midstride.engine.registry.comparison import PromotionDecision
from midstride.engine.registry.nightly import NightlyRun
from midstride.engine.registry.registry import ModelRegistry
from midstride.engine.runs.run import Run
from midstride.engine.testing import run_ranks


def _life(job: TrainingJob, run: str, compared: Path) -> None:
    make_importable(job.folder)
    module, data = build_module(job), build_data(job)
    build_trainer(job).fit(module, data, run=job.run_url(run))
    compared.write_text(json.dumps(evaluate_with_champion(Run(job, run))))


class Nights(House):
    """Nights without Prefect, of lives that are forked: what the flow does, in a second each."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        (folder / "faults").mkdir()
        self.plan = FaultPlan(folder / "faults")
        self.codes: list[int] = []

    def begin(self, day: int, *overrides: str) -> NightlyRun:
        return NightlyRun.begin(self.job(*overrides), self.date(day))

    def night(self, day: int, *overrides: str) -> PromotionDecision:
        night = self.begin(day, *overrides)
        self.codes = []
        if decision := night.decision():
            return decision
        data = prepare(night.run)
        decision = night.decide(self.train(night))
        night.close(decision, data)
        return decision

    def train(self, night: NightlyRun) -> dict[str, object]:
        """Give the night's run lives until one comes to the end; return what comparing it gave."""
        path = self.folder / f"{night.run.name}.json"
        self.codes = []
        environment = {**os.environ, **self.plan.environment, "START": str(self.folder / "start")}
        while 0 not in self.codes:
            self.codes += run_ranks(_life, night.job, night.run.name, path, environment=environment)
            assert set(self.codes) <= {0, -9}
        return dict(json.loads(path.read_text()))


@pytest.fixture
def house(tmp_path: Path) -> Nights:
    return Nights(tmp_path)


def test_ten_nights(house: Nights) -> None:
    # 1: there is no champion, so the first is promoted.
    house.comes_in(1, 1.0)
    assert house.night(1).why == "test/level 1: the first champion"
    assert house.reigning() == (1, "level-2026-03-01")

    # 2: the data do not come. The night fails, the champion stays.
    with pytest.raises(UserError, match="while preparing the data"):
        house.night(2)
    assert house.reigning() == (1, "level-2026-03-01")

    # 3: better, and killed on the way: it resumes, and takes the champion's place.
    house.comes_in(3, 2.0)
    house.plan.add("kill", rank=0, step=2, phase="forward")
    third = house.night(3)
    house.plan.assert_all_fired()
    assert house.codes == [-9, 0]
    assert third.champion == {"test/level": 1.0, "test/level_seen": 2.0}, "the same test set for both"
    assert third.why == "test/level 2 against 1: better by 1, more than the margin of 0.125"
    assert house.reigning() == (2, "level-2026-03-03")

    # 4, 5, 6: worse, equal, and better by no more than the margin.
    for day, level, why in ((4, 1.5, "worse by 0.5"), (5, 2.0, "not better"), (6, 2.125, "not more than the margin")):
        house.comes_in(day, level)
        kept = house.night(day)
        assert not kept.promoted
        assert why in kept.why
    assert house.reigning() == (2, "level-2026-03-03")

    # The data of the second day come late: its night is made up for, and is no better than today's champion.
    house.comes_in(2, 1.75)
    assert "worse by 0.25" in house.night(2).why

    # 7: better; and again, which changes nothing and trains nothing.
    house.comes_in(7, 3.0)
    assert house.night(7) == house.night(7)
    assert house.codes == []
    assert house.reigning() == (3, "level-2026-03-07")

    # A person does not like it and goes back; the same night once more does not bring it back.
    ModelRegistry.of(house.job()).roll_back()
    house.night(7)
    assert house.reigning() == (4, "level-2026-03-03")

    # 8: worse than whom we went back from, better than who reigns.
    house.comes_in(8, 2.5)
    assert house.night(8).over == 4
    assert house.reigning() == (5, "level-2026-03-08")

    # 9: from the champion's weights on, and killed before its first snapshot: the next life begins there too.
    house.comes_in(9, 3.5)
    house.plan.add("kill", rank=0, step=0, phase="forward")
    assert house.night(9, "nightly.warm_start=true").promoted
    house.plan.assert_all_fired()
    assert house.codes == [-9, 0]
    assert (house.folder / "start").read_text().split()[-2:] == ["2.5", "2.5"], "both lives"

    # 10: while it is compared another is promoted. It is told, and compares again.
    house.comes_in(10, 5.0)
    night = house.begin(10)
    prepare(night.run)
    compared = house.train(night)
    house.comes_in(11, 4.0)
    assert house.night(11).promoted
    with pytest.raises(Overtaken, match="level-2026-03-11 became champion"):
        night.decide(compared)
    assert house.reigning() == (7, "level-2026-03-11")
    assert night.decide(house.train(night)).why.startswith("test/level 5 against 4:")
    assert house.reigning() == (8, "level-2026-03-10")
