"""A module and data with hyperparameters, told to trackers in every way people have, and a run of it that dies."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from laws.lightning.beside import Parts
from laws.lightning.lives import DEATHS, life, midstride_weights
from laws.lightning.style import Classifier
from laws.lightning.table import Row

from midstride.engine.fault_injection import FaultPlan


class Tracked(Classifier):
    """Logs hyperparameters before the first step, between steps, and after the last death."""

    def on_train_start(self):
        self.logger.log_hyperparams({"trial": {"head": "linear"}, "threshold": torch.tensor(0.5)}, {"hp_metric": 0})
        self.logger.log_hyperparams(Namespace(folds=5))

    def on_train_batch_start(self, batch, batch_idx):
        if self.global_step == 2:
            self.logger.experiment.config.update({"found_rate": float("nan")})
        if self.global_step == 9:
            self.logger.experiment.config["late"] = True
            self.logger.experiment.add_hparams({"later": "yes"}, {})
            self.logger.experiment.log_param("a run", "latest", 3)


def live_tracked(folder: str, loggers: list[dict[str, Any]]) -> None:
    """Train it to the end, over all deaths."""
    row = Row(Tracked, lambda: {"data": Parts()}, {"loggers": loggers})
    plan = FaultPlan(Path(folder) / "plan")
    for step, phase in DEATHS:
        plan.add("kill", step=step, phase=phase)
    codes = [life(plan, midstride_weights, row, Path(folder) / "run") for _ in range(len(DEATHS) + 1)]
    plan.assert_all_fired()
    assert codes == [-9] * len(DEATHS) + [0]
