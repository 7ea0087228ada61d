"""What `self.log` makes of a value in each hook: it stands in the row of its step, or is not taken and that said."""

import csv
from pathlib import Path
from typing import Any

import pytest
from support.refused import Module, Numbers, fit
from torch import Tensor
from torch.utils.data import DataLoader

from midstride.engine import Callback
from midstride.engine.errors import EngineError

STEPS = ("1", "2", "3", "4", "5", "6")
ENDS = ("3", "6")
#: hook -> the steps in whose rows it logs, of two epochs of three batches; or what it is told
WHERE: dict[str, tuple[str, ...] | str] = {
    "setup": "in setup, before there is a row for it: log in on_train_start or later",
    "on_fit_start": ("1",),
    "on_train_start": ("3",),
    "on_train_epoch_start": ENDS,
    **dict.fromkeys(("on_train_batch_start", "on_before_backward", "on_after_backward"), STEPS),
    **dict.fromkeys(("on_before_optimizer_step", "on_before_zero_grad", "on_train_batch_end"), STEPS),
    **dict.fromkeys(("on_validation_start", "on_validation_epoch_start", "on_validation_batch_start"), ENDS),
    **dict.fromkeys(("on_validation_batch_end", "on_validation_epoch_end", "on_train_epoch_end"), ENDS),
    "on_validation_end": "after the values of this evaluation were reduced: log in its on_..._epoch_end",
    **dict.fromkeys(("on_train_end", "on_fit_end", "teardown"), ()),
}
LATE = "self.log('x') after the last row: the value is dropped. Log in on_train_epoch_end instead."


class Validated(Module):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        pass

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Numbers(2), 2)


@pytest.mark.parametrize("owner", ["module", "callback"])
@pytest.mark.parametrize("hook", WHERE)
def test_what_a_hook_logs_stands_in_its_row_or_is_not_taken(
    tmp_path: Path, hook: str, owner: str, caplog: pytest.LogCaptureFixture
) -> None:
    def log(self: Any, *given: Any, **_: Any) -> None:
        module = self if owner == "module" else given[1]
        module.log("x", 7.0)

    module = type("Logging", (Validated,), {hook: log} if owner == "module" else {})()
    callback = type("Beside", (Callback,), {hook: log} if owner == "callback" else {})()
    options: dict[str, Any] = {"data": DataLoader(Numbers(6), 2), "callbacks": [callback], "max_epochs": 2}
    where = WHERE[hook]
    if isinstance(where, str):
        with pytest.raises(EngineError) as refused:
            fit(tmp_path / "run", module=module, **options)
        assert f"self.log('x') {where}" in str(refused.value)
    else:
        fit(tmp_path / "run", module=module, **options)
        written = list(csv.DictReader((tmp_path / "run" / "metrics.csv").read_text().splitlines()))
        assert [(row["step"], row["x"]) for row in written if row.get("x")] == [(step, "7.0") for step in where]
        assert caplog.messages.count(LATE) == (0 if where else 1)
