"""Law of forks: forked or replayed unchanged, a run has its parent's bits, and the parent does not change."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from laws.lives import Setting, assert_runs_alike, live

from midstride.engine.runs.replayed_rows import first_difference, parse_rows
from midstride.engine.runs.run_report import metric_rows
from midstride.engine.session.replay_plan import NEVER, RESULT, ReplayPlan
from midstride.engine.snapshots.forks import fork, snapshot_at
from midstride.engine.snapshots.parent import open_run
from midstride.engine.storage.store import Store

#: strategy -> ranks
COVER = {"single": 1, "ddp": 3}
PRODUCT = COVER | {"dp": 1, "ddp2": 2, "sharded": 2, "fully_sharded": 2}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "strategy" in metafunc.fixturenames:
        everything = metafunc.config.getoption("--laws") == "all"
        metafunc.parametrize("strategy", PRODUCT if everything else COVER)


def setting_of(strategy: str) -> Setting:
    options: dict[str, Any] = {"strategy": strategy, "snapshots": {"every_steps": 2, "keep": 100}}
    if strategy == "dp":
        options["devices"] = 2
    return Setting(ranks=PRODUCT[strategy], options=options)


def state_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return time and content of every file in `folder`, and the times of its folders."""
    found = sorted([folder, *folder.rglob("*")])
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"") for path in found}


def test_a_fork_ends_with_the_bits_of_its_parent(strategy: str, tmp_path: Path) -> None:
    setting, parent, child = setting_of(strategy), tmp_path / "parent", tmp_path / "child"
    for folder in (parent, child):
        folder.mkdir()
    assert live(setting, parent) == [0] * setting.ranks
    before, source = state_of(parent / "run"), open_run(str(parent / "run"))
    fork(source, snapshot_at(source, 4), Store.open(child / "run"))
    assert live(setting, child) == [0] * setting.ranks
    assert_runs_alike(str(child / "run"), str(parent / "run"))

    again = tmp_path / "again"
    again.mkdir()
    fork(source, snapshot_at(source, 4), Store.open(again / "run"), is_temporary=True)
    never = replace(setting, options={**setting.options, "snapshots": {"every_steps": NEVER}})
    assert 0 not in live(never, again, ReplayPlan(str(again), 9))
    rows = parse_rows(json.loads((again / RESULT).read_text())["rows"])
    assert [int(row["step"]) for row in rows] == [*range(4, 10)]
    assert first_difference(metric_rows(source), rows, 9) is None
    assert state_of(parent / "run") == before
