"""Reports on a narrow terminal: sentences are wrapped, long words folded, and nothing is cut."""

import io

import pytest
from rich.console import Console

from midstride.engine.cli.report_view import show_report, show_runs
from midstride.engine.registry.comparison import compare
from midstride.engine.registry.report import NightlyReport
from midstride.engine.runs.markdown import summary_rows
from midstride.engine.runs.report import Interruption, Report
from midstride.engine.runs.summary import RunSummary
from midstride.flows.terminal import show_nightly_report

LONG = "[very]-long-name-" * 6
REFUSAL = f"""this is not the run that snapshot 000000000050-g000001 of /srv/{LONG}/first belongs to:
  seed: the snapshot has 7, this run has 8
  data_args: the snapshot has {{'folder': '/data/{LONG}'}}, this run has {{'folder': '/data/b'}}"""


def letters(text: str) -> str:
    return "".join(character for character in text if character.isalnum() or character in "[]…")


@pytest.fixture(params=[60, 80, 200])
def console(request: pytest.FixtureRequest) -> Console:
    return Console(width=request.param, file=io.StringIO(), force_terminal=False)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    said = console.file.getvalue()
    assert "…" not in said
    return letters(said)


def test_a_refusal_is_read_whole(console: Console) -> None:
    causes = [Interruption(attempt=1, cause=REFUSAL, step=50)]
    causes += [Interruption(attempt=2, cause="killed", step=70, resumed_step=60, steps_lost=10, seconds_lost=3.2)]
    set_aside = {"000000000050-g000001": f"/srv/{LONG} is missing"}
    report = Report(job="digits", run="a", url="u", outcome="user_error", set_aside=set_aside, failures=causes)
    show_report(console, report)
    said = shown(console)
    for sentence in (
        REFUSAL,
        *set_aside.values(),
        "after step 70, went on from step 60, steps lost: 10, time lost: 3.2 s",
    ):
        assert letters(sentence) in said


@pytest.mark.parametrize("seconds", [0.0, 3.2])
def test_the_time_of_a_script_without_attempts_is_not_told(seconds: float) -> None:
    report = Report(job="digits", run="a", url="u", outcome="done", seconds=seconds)
    assert ("time" in dict(summary_rows(report))) == bool(seconds)


def test_a_nights_reason_is_read_whole(console: Console) -> None:
    decision = compare({LONG: 0.93}, {LONG: 0.91}, metric=LONG, mode="max", margin=0.01)
    report = NightlyReport(
        job="digits", date="2026-03-01", run=f"digits-{LONG}", url="u", decision=decision, champion="a", weights="w"
    )
    show_nightly_report(console, report)
    assert letters(report.verdict) in shown(console)


def test_runs_are_told_apart(console: Console) -> None:
    show_runs(console, "runs", [RunSummary(name=f"a-{LONG}", job="digits", state="done", best=(LONG, 0.5))], now=0.0)
    assert "…" not in shown(console)
