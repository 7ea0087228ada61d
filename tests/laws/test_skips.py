"""Law of `skip_batches` and `skip_samples`: what is left out is named, and a killed run ends with the same bits."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from laws.lives import Setting, assert_alike, journal, live, live_on

from midstride.engine.fault_injection import FaultPlan
from midstride.engine.runs.audit import audit

#: options, and the epochs and batches that are skipped
SKIPS: dict[str, tuple[dict[str, Any], set[tuple[int, int]]]] = {
    "batches": ({"skip_batches": ["3-4", 9]}, {(0, 2), (0, 3), (1, 2)}),
    "windows": ({"skip_batches": [2], "accumulate_grad_batches": 4, "max_epochs": 4}, {(0, 4), (0, 5)}),
    "samples": ({"skip_samples": [3, 5]}, set()),
}


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("kind", SKIPS)
def test_what_is_skipped_is_not_trained_on(kind: str, ranks: int, tmp_path: Path) -> None:
    options, batches = SKIPS[kind]
    setting = Setting(ranks, workers=2, options={"snapshots": {"every_steps": 1, "keep": 99}, **options})
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    for folder in (whole, torn):
        folder.mkdir()
    assert live(setting, whole) == [0] * ranks
    plan = FaultPlan(torn / "plan")
    for step, phase in ((2, "backward"), (5, "fetch")):
        plan.add("kill", rank=step % ranks, step=step, phase=phase)
    live_on(replace(setting, workers=0), torn, plan)
    assert_alike(torn, whole)
    trained = journal(whole)
    assert not batches & {(epoch, batch) for _, epoch, batch in map(json.loads, trained)}
    account = audit(str(whole / "run"))
    assert account.is_clean
    assert {(one.epoch, batch) for one in account.epochs for batch in one.skipped} == batches
    left_out = {3, 5} if kind == "samples" else set()
    assert not left_out & {index for indices in trained.values() for index in indices}
    assert {f"sample {index}" for index in left_out} == {text.partition(" was")[0] for text in account.bad_samples}
