"""A house whose one job is trained every night: its incoming data, its runs, its champions."""

import shutil
from pathlib import Path

from midstride.engine.config.job import TrainingJob
from midstride.engine.registry.registry import ModelRegistry
from midstride.engine.session.attempts import AttemptLog
from midstride.engine.storage.store import Store

JOB = """
name: level
module: model:Level
data: model:Days
data_args: {incoming: "./incoming/{date}.txt", folder: "./data/{date}"}
trainer: {max_epochs: 1, enable_progress_bar: false}
snapshots: {url: runs, every_steps: 1}
monitor: {metric: val/level, mode: max}
nightly: {margin: 0.125}
"""


class House:
    """Where nights are tried, in `folder`; days are those of March 2026."""

    def __init__(self, folder: Path) -> None:
        shutil.copy(Path(__file__).with_name("nightly_model.py"), folder / "model.py")
        (folder / "incoming").mkdir()
        (folder / "job.yaml").write_text(JOB)
        self.folder = folder

    def job(self, *overrides: str) -> TrainingJob:
        """Return the job, with choices set from outside."""
        return TrainingJob.load(self.folder / "job.yaml", overrides)

    def date(self, day: int) -> str:
        """Return the date of a day."""
        return f"2026-03-{day:02d}"

    def comes_in(self, day: int, level: float) -> None:
        """Have the data of a day arrive."""
        (self.folder / "incoming" / f"{self.date(day)}.txt").write_text(str(level))

    def reigning(self) -> tuple[int, str]:
        """Return the champion's number and the run it came from."""
        champion = ModelRegistry.of(self.job()).current()
        assert champion is not None
        return champion.number, champion.run

    def attempts(self, day: int) -> list[str]:
        """Return how the attempts to train on a day's data ended."""
        store = Store.open(self.job().run_url(f"level-{self.date(day)}"))
        return [attempt.outcome for attempt in AttemptLog(store).attempts()]
