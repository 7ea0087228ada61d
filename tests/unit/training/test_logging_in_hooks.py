"""What `self.log` makes of a value in each hook: it stands in the row of its step, or is not taken and that said."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from midstride.engine import Callback, Trainer, TrainingModule
from midstride.engine.errors import EngineError

STEPS = ("1", "2", "3", "4", "5", "6")
ENDS = ("3", "6")
#: hook -> the steps in whose rows it logs, of two epochs of three batches; or what it is told
WHERE: dict[str, tuple[str, ...] | str] = {
    "setup": "in setup, before there is a row for it: log in on_train_start or later",
    **dict.fromkeys(("on_fit_start", "on_train_start"), ("1",)),
    "on_train_epoch_start": ("1", "4"),
    **dict.fromkeys(("on_train_batch_start", "on_before_backward", "on_after_backward"), STEPS),
    **dict.fromkeys(("on_before_optimizer_step", "on_before_zero_grad", "on_train_batch_end"), STEPS),
    **dict.fromkeys(("on_validation_start", "on_validation_epoch_start", "on_validation_batch_start"), ENDS),
    **dict.fromkeys(("on_validation_batch_end", "on_validation_epoch_end", "on_train_epoch_end"), ENDS),
    "on_validation_end": "comes after the values of this evaluation were put together: log in its on_..._epoch_end",
    **dict.fromkeys(("on_train_end", "on_fit_end", "teardown"), ()),
}
LATE = "self.log('x') comes after the last row, and is in none: log in on_train_epoch_end instead."


class Line(TrainingModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.layer(batch[:, None]).square().mean()
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.parametrize("owner", ["module", "callback"])
@pytest.mark.parametrize("hook", WHERE)
def test_what_a_hook_logs_stands_in_its_row_or_is_not_taken(
    tmp_path: Path, hook: str, owner: str, caplog: pytest.LogCaptureFixture
) -> None:
    def log(self: Any, *given: Any, **_: Any) -> None:
        module = self if owner == "module" else given[1]
        module.log("x", 7.0)

    module = type("Logging", (Line,), {hook: log} if owner == "module" else {})()
    callback = type("Beside", (Callback,), {hook: log} if owner == "callback" else {})()
    trainer = Trainer(max_epochs=2, callbacks=[callback], enable_progress_bar=False)
    rows, where = DataLoader(torch.arange(6.0), 2), WHERE[hook]  # type: ignore[arg-type]
    if isinstance(where, str):
        with pytest.raises(EngineError) as refused:
            trainer.fit(module, rows, rows, run=tmp_path / "run")
        assert f"self.log('x') {where}" in str(refused.value)
    else:
        trainer.fit(module, rows, rows, run=tmp_path / "run")
        written = list(csv.DictReader((tmp_path / "run" / "metrics.csv").read_text().splitlines()))
        assert [(row["step"], row["x"]) for row in written if row.get("x")] == [(step, "7.0") for step in where]
        assert caplog.messages.count(LATE) == (0 if where else 1)
