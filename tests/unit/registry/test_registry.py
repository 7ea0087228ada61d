"""Champions: who is better, one winner of a race, back to the one before, and a night that is planned once."""

import json
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.champions import WEIGHTS, keep_weights, promote
from unit.cli.test_app import run as command

from midstride.engine.config.job import TrainingJob
from midstride.engine.config.options import GateOptions
from midstride.engine.errors import JobError, Overtaken, SnapshotDamaged, UserError
from midstride.engine.jobs.build import build_module
from midstride.engine.registry.comparison import PromotionDecision, compare, with_gates
from midstride.engine.registry.nightly import NightlyRun, metric_of, nightly_errors
from midstride.engine.registry.registry import ModelRegistry
from midstride.engine.runs.run import Run
from midstride.engine.storage.local import LocalStore
from midstride.engine.storage.store import Store

JOB: dict[str, Any] = {
    "name": "digits",
    "module": "model:Net",
    "data": "model:Data",
    "data_args": {"folder": "/data/{date}", "windows": ["{date}", 7]},
    "trainer": {"max_epochs": 1},
    "monitor": {"metric": "val/acc", "mode": "max"},
}


@pytest.fixture(params=["local", "s3"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "runs") if request.param == "local" else f"{request.getfixturevalue('bucket')}/runs"


def job_at(url: str, **changes: Any) -> TrainingJob:
    return TrainingJob.model_validate({**JOB, "snapshots": {"url": url}, **changes})


def reigning(job: TrainingJob) -> str | None:
    champion = ModelRegistry.of(job).current()
    return champion and champion.run


# --- who is better --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("new", "old", "mode", "margin", "promoted"),
    [
        (0.5, None, "max", 0.0, True),
        (math.nan, None, "max", 0.0, False),
        (0.5, 0.5, "max", 0.0, False),
        (0.75, 0.5, "max", 0.0, True),
        (0.75, 0.5, "max", 0.25, False),
        (0.76, 0.5, "max", 0.25, True),
        (0.25, 0.5, "max", 0.0, False),
        (0.25, 0.5, "min", 0.0, True),
        (0.25, 0.5, "min", 0.25, False),
        (0.75, 0.5, "min", 0.0, False),
        (math.inf, 0.5, "max", 0.0, False),
        (math.nan, 0.5, "min", 0.0, False),
        (0.5, math.nan, "min", 0.0, True),
    ],
)
def test_only_the_better_one_is_promoted(
    new: float, old: float | None, mode: Any, margin: float, promoted: bool
) -> None:
    champion = None if old is None else {"acc": old}
    decision = compare({"acc": new}, champion, metric="acc", mode=mode, margin=margin)
    assert decision.promoted is promoted, decision.why
    assert f"{new:.4g}" in decision.why


#: limits of the value "r", that of the challenger, that of the champion, words on the limits that fail
GATES: list[tuple[dict[str, float], float, float | None, list[str]]] = [
    ({"min": 0.5}, 0.5, None, []),
    ({"min": 0.5, "max": 2.0}, 0.25, None, ["r 0.25 fails min 0.5"]),
    ({"max": 2.0}, 2.5, 9.0, ["r 2.5 fails max 2"]),
    ({"max_drop": 0.0}, 0.5, 0.5, []),
    ({"max_drop": 0.0}, 0.25, 0.5, ["r 0.25 fails max_drop 0; the champion has 0.5"]),
    ({"max_drop": 0.25}, 0.25, 0.5, []),
    ({"max_rise": 0.25}, 1.0, 0.5, ["r 1 fails max_rise 0.25; the champion has 0.5"]),
    ({"max_rise": 0.25, "max_drop": 0.25}, 0.75, 0.5, []),
    ({"max_drop": 0.0}, 0.25, None, []),
    ({"max_drop": 0.0}, 0.25, math.nan, []),
    (
        {"min": 0.5, "max_drop": 1.0},
        math.inf,
        0.5,
        ["r inf fails min 0.5", "r inf fails max_drop 1; the champion has 0.5"],
    ),
]


@pytest.mark.parametrize(("limits", "new", "old", "failed"), GATES)
@pytest.mark.parametrize("better", [True, False])
def test_a_challenger_outside_of_a_gate_is_not_promoted(
    limits: dict[str, float], new: float, old: float | None, failed: list[str], better: bool
) -> None:
    champion = {"acc": 0.5, **({} if old is None else {"r": old})}
    challenger = {"acc": 0.75 if better else 0.25, "r": new}
    ungated = compare(challenger, champion, metric="acc", mode="max")
    decision = with_gates(ungated, {"r": GateOptions.model_validate(limits)})
    assert list(decision.failed_gates) == failed
    assert decision.promoted == (better and not failed)
    assert all(words in decision.why for words in failed)
    assert {*decision.failed_gates} <= {*decision.gates}


def test_a_test_that_does_not_log_the_metric_is_named() -> None:
    with pytest.raises(JobError, match="the test logs no acc; it logs loss"):
        compare({"loss": 1.0}, None, metric="acc", mode="max")
    with pytest.raises(JobError, match="gates: the test logs no r; it logs acc"):
        with_gates(compare({"acc": 1.0}, None, metric="acc", mode="max"), {"r": GateOptions(min=0.0)})


@pytest.mark.parametrize(
    ("monitor", "chosen", "metric"),
    [
        ("val/acc", None, "test/acc"),
        ("val_loss", None, "test_loss"),
        ("value", None, "value"),
        ("val/acc", "test/f1", "test/f1"),
    ],
)
def test_the_metric_follows_from_the_monitor(monitor: str, chosen: str | None, metric: str) -> None:
    job = job_at("runs", monitor={"metric": monitor}, nightly={"metric": chosen})
    assert metric_of(job) == metric


# --- the line -------------------------------------------------------------------------------------------------------


def test_the_last_promoted_is_champion_and_rollback_goes_back(store_url: str) -> None:
    job = job_at(store_url)
    line = ModelRegistry.of(job)
    assert line.current() is None
    for over, run in enumerate(["first", "second", "third"]):
        promote(job, run, over or None)
        assert reigning(job) == run
    store = Store.open(line.weights_url(line.champion(1)))
    assert store.read("model.safetensors") == b"weights of first", "the old champion is kept"
    assert [line.roll_back().run, line.roll_back().run] == ["second", "first"]
    with pytest.raises(UserError, match="first is the first champion"):
        line.roll_back()
    promote(job, "fourth", 5)
    assert line.roll_back().run == "first", "whom the fourth took the place of"
    assert [one.run for one in line.champions()] == ["first", "second", "third", "second", "first", "fourth", "first"]


def test_one_of_many_promotions_wins_and_others_are_told(store_url: str) -> None:
    job, runs = job_at(store_url), [f"run-{number}" for number in range(4)]
    promote(job, "champion", None)
    gate, told, won = threading.Barrier(len(runs)), [], []

    def race(run: str) -> None:
        gate.wait()
        try:
            promote(job, run, 1)
            won.append(run)
        except Overtaken as error:
            told.append(str(error))

    racers = [threading.Thread(target=race, args=(run,)) for run in runs]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert won == [reigning(job)]
    assert len(told) == len(runs) - 1
    assert all(f"{won[0]} became champion" in words for words in told)


def test_a_crown_whose_answer_was_lost_is_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS asks again where an answer was lost, and is told that the file is there."""
    created = LocalStore.create
    monkeypatch.setattr(LocalStore, "create", lambda *args: created(*args) and False)
    job = job_at(str(tmp_path))
    promote(job, "first", None)
    assert reigning(job) == "first"


def test_damaged_weights_are_not_promoted(tmp_path: Path) -> None:
    job = job_at(str(tmp_path))
    promote(job, "first", None)
    keep_weights(job, "second")
    Path(job.run_url("second"), WEIGHTS, "model.safetensors").write_bytes(b"others, alike long")
    decision = PromotionDecision(promoted=True, why="", metric="acc", mode="max", margin=0, challenger={}, over=1)
    with pytest.raises(SnapshotDamaged):
        ModelRegistry.of(job).promote(Run(job, "second"), "best", decision)
    assert reigning(job) == "first"


def folder_in_place(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:40]), "is no JSON document with a checksum"),
        (lambda path: path.write_bytes(path.with_name("000001.json").read_bytes()), "is the file of number 1"),
        (folder_in_place, "000003.json cannot be read: Is a directory"),
    ],
)
def test_a_damaged_champion_is_named_and_others_count(
    tmp_path: Path, damage: Callable[[Path], object], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job = job_at(str(tmp_path))
    for over, run in enumerate(("first", "second", "third", "fourth")):
        promote(job, run, over or None)
    registry, champions = ModelRegistry.of(job), tmp_path / "_champions" / "digits"
    damage(champions / "000003.json")
    assert [one.number for one in registry.champions()] == [1, 2, 4]
    assert registry.promoted("second"), "a night asks for its own, whatever became of others"
    (champions / "000004.json").unlink()
    assert command("champion", "show", str(tmp_path)) == 1
    shown = capsys.readouterr().err
    assert said in shown
    assert "or remove it" in shown


# --- a night --------------------------------------------------------------------------------------------------------


def test_a_night_has_its_date_in_its_run_and_its_arguments(tmp_path: Path) -> None:
    night = NightlyRun.begin(job_at(str(tmp_path)), "2026-03-01")
    assert night.run.name == "digits-2026-03-01"
    assert night.job.data_args == {"folder": "/data/2026-03-01", "windows": ["2026-03-01", 7]}
    assert night.job.weights is None


def test_a_warm_start_is_planned_once(tmp_path: Path) -> None:
    job = job_at(str(tmp_path), nightly={"warm_start": True})
    assert NightlyRun.begin(job, "2026-03-01").job.weights is None, "there was no champion"
    promote(job, "first", None)
    planned = NightlyRun.begin(job, "2026-03-02").job.weights
    promote(job, "second", 1)
    assert planned == ModelRegistry.of(job).weights_url(ModelRegistry.of(job).champion(1))
    assert NightlyRun.begin(job, "2026-03-02").job.weights == planned, "a retry begins where the first try began"
    assert NightlyRun.begin(job, "2026-03-01").job.weights is None
    assert NightlyRun.begin(job, "2026-03-03").job.weights == ModelRegistry.of(job).weights_url(
        ModelRegistry.of(job).champion(2)
    )


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(b"other weights!!!")])
def test_lost_weights_of_a_champion_have_a_way_out(tmp_path: Path, damage: Callable[[Path], Any]) -> None:
    job = job_at(str(tmp_path), nightly={"warm_start": True}, module="midstride.engine:TrainingModule", module_args={})
    promote(job, "first", None)
    planned = NightlyRun.begin(job, "2026-03-01").job
    damage(Path(str(planned.weights), "model.safetensors"))
    with pytest.raises(JobError) as caught:
        build_module(planned)
    assert "They are a champion's: restore them from a copy" in str(caught.value)
    assert f"`midstride champion rollback {tmp_path}`" in str(caught.value)
    assert "snapshots repair" not in str(caught.value), "which knows nothing of champions"


def test_a_night_that_was_killed_after_it_promoted_has_promoted(tmp_path: Path) -> None:
    job = job_at(str(tmp_path))
    night = NightlyRun.begin(job, "2026-03-01")
    keep_weights(job, night.run.name)
    first = {"challenger": {"test/acc": 0.5}, "champion": None, "over": None, "weights": "best"}
    assert night.decide(first).promoted
    again = {**first, "champion": {"test/acc": 0.5}, "over": 1}
    assert night.decide(again).why == "test/acc 0.5: the first champion"
    assert len(ModelRegistry.of(job).champions()) == 1


def test_data_are_new_that_differ_from_the_last_decided_nights(tmp_path: Path) -> None:
    job, data = job_at(str(tmp_path)), {"folder": "/data/1", "files": 1, "bytes": 3, "checksum": "a"}
    kept = compare({"acc": math.nan}, None, metric="acc", mode="max")
    first, second = (NightlyRun.begin(job, f"2026-03-0{day}") for day in (1, 2))
    assert first.is_new(data), "there was no night before"
    first.close(kept, data)
    assert not second.is_new({**data, "folder": "/data/2"})
    assert second.is_new({**data, "checksum": "b"})
    with pytest.raises(JobError, match="keeps no folder"):
        second.is_new({**data, "folder": None})
    first.run.store.write("decision.json", b"{")
    assert second.is_new(data), "which data they were is unknown, and ends no other night"
    with pytest.raises(SnapshotDamaged, match=r"decision.json is no JSON .*restore it from a copy, or remove it"):
        first.decision()


def test_what_keeps_a_job_from_nights_is_told_at_once(tmp_path: Path) -> None:
    job = job_at(str(tmp_path)).model_copy(update={"monitor": None, "snapshots": None})
    assert [fault.partition(":")[0] for fault in nightly_errors(job, "yesterday")] == ["date", "monitor", "snapshots"]
    assert nightly_errors(job_at("runs"), "2026-02-30")
    assert not nightly_errors(job_at("runs"), "2026-02-28T1400")


# --- the command line -----------------------------------------------------------------------------------------------


def test_champions_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = str(tmp_path / "runs")
    assert command("champion", "show", url) == 2
    assert "has no champions" in capsys.readouterr().err
    job = job_at(url)
    promote(job, "digits-2026-03-01", None)
    promote(job, "digits-2026-03-02", 1)
    assert command("champion", "list", url) == 0
    assert "digits-2026-03-02" in capsys.readouterr().out
    assert command("champion", "show", url, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["run"] == "digits-2026-03-02"
    assert Path(shown["weights"], "model.safetensors").read_bytes() == b"weights of digits-2026-03-02"
    assert command("champion", "rollback", url) == 0
    assert "digits-2026-03-01 is champion of digits again, after digits-2026-03-02" in capsys.readouterr().out
    assert command("champion", "rollback", url) == 2
    assert "no earlier one to restore" in capsys.readouterr().err
    promote(job_at(url, name="letters"), "letters-2026-03-01", None)
    assert command("champion", "rollback", url) == 2
    assert "choose one with --job: digits, letters" in capsys.readouterr().err
    assert command("champion", "show", url, "--job", "letters") == 0
