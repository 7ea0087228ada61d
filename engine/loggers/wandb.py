# pyright: reportAttributeAccessIssue=false
# where the library is not installed
"""Weights & Biases: one run, offline one folder."""

import glob
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import xxhash

from midstride.engine.errors import UserError
from midstride.engine.loggers.base import CommittedRows, Conclusion, LoggedRun, Logger, Row

__all__ = ["WandbLogger"]


class WandbLogger(Logger):
    """Logs all attempts of a run to one W&B run of its name, and no other run to that one.

    Offline, each attempt writes the folder `dir/wandb/offline-run-...-RUN-ID` anew from the committed rows and removes
    those of earlier attempts, so that `wandb sync` finds one. Online, an attempt continues after the server's last
    step. The server keeps its rows: if a run goes back behind sent rows, their repetitions are dropped.

    Args:
        project: that the run belongs to; in a job by default its name.
        entity: user or team; by default the one that is logged in.
        mode: "online" or "offline".
        dir: a folder; by default the one that holds the runs.
    """

    def __init__(
        self,
        project: str = "midstride",
        entity: str | None = None,
        mode: Literal["online", "offline"] = "online",
        dir: str | None = None,
    ) -> None:
        self._project, self._entity, self._dir = project, entity, dir
        self._mode: Literal["online", "offline"] = mode
        self._run: Any = None
        self._hparams = "{}"

    def open(self, run: LoggedRun, rows: CommittedRows) -> int:
        """Begin the W&B run, or go on with it.

        Raises:
            UserError: the runs are in no folder, and no `dir` is given.
        """
        import wandb

        self._hparams = json.dumps(dict(run.hparams), indent=1, default=str)
        folder, offline = self._folder(run), self._mode == "offline"
        if offline:
            for earlier in folder.glob(f"wandb/offline-run-*-{glob.escape(_id(run))}"):
                shutil.rmtree(earlier)
        settings = wandb.Settings(console="off", silent=True, x_disable_stats=True, disable_git=True, save_code=False)
        self._run = wandb.init(
            project=self._project,
            entity=self._entity,
            id=_id(run),
            name=run.name,
            dir=str(folder),
            config=dict(run.hparams),
            mode=self._mode,
            resume=None if offline else "allow",
            settings=settings,
        )
        return max(0, self._run.step - 1) if self._run.resumed else 0

    def log_rows(self, rows: Sequence[Row]) -> None:
        """Log rows, each at its step."""
        for row in rows:
            self._run.log({"epoch": row.epoch, **row.values}, step=row.step)

    def finish(self, best: Path | None) -> None:
        """Log the best weights as an artifact, RUN-best, and end the W&B run."""
        import wandb

        if best is not None:
            artifact = wandb.Artifact(f"{self._run.name}-best", type="model")
            artifact.add_file(str(best))
            self._run.log_artifact(artifact)
        self.close()

    def conclude(self, conclusion: Conclusion) -> None:
        """Log end and test results of the run in the summary, and its report as an artifact."""
        import wandb

        self._run.summary.update({"ended": conclusion.why, **conclusion.test})
        if conclusion.report:
            artifact = wandb.Artifact(f"{self._run.name}-report", type="report")
            for name, text in (("report.md", conclusion.report), ("hyperparameters.json", self._hparams)):
                with artifact.new_file(name) as file:
                    file.write(text)
            self._run.log_artifact(artifact)

    def close(self) -> None:
        """End the W&B run. Its id can continue it."""
        if (run := self._run) is not None:
            self._run = None
            run.finish()

    def _folder(self, run: LoggedRun) -> Path:
        if self._dir is None and "://" in run.url:
            raise UserError(f"W&B needs a folder, and the run is at {run.url}: loggers: [{{wandb: {{dir: /path}}}}]")
        folder = Path(self._dir) if self._dir is not None else Path(run.url).parent
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def _id(run: LoggedRun) -> str:
    """Return the id of the W&B run, which differs between runs of one name."""
    return f"{run.name}-{(run.run_id or xxhash.xxh3_64_hexdigest(run.url.encode()))[:8]}"
