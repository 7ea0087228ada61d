"""Reports on a narrow terminal: sentences are wrapped, long words folded, and nothing is cut."""

import io

import pytest
from rich.console import Console

from midstride.engine.cli.output import show_audit
from midstride.engine.cli.report_view import show_report, show_runs
from midstride.engine.cli.table import show_table
from midstride.engine.registry.comparison import compare
from midstride.engine.registry.night_report import NightlyReport
from midstride.engine.runs.audit import Audit, EpochAudit
from midstride.engine.runs.report_text import markdown_of, summary_rows
from midstride.engine.runs.run_report import Interruption, Report
from midstride.engine.runs.summary import RunSummary
from midstride.engine.session.ending import EndReason
from midstride.flows.terminal import show_nightly_report

LONG = "[very]-long-name-" * 6
REFUSAL = f"""this is not the run that snapshot 000000000050-g000001 of /srv/{LONG}/first belongs to:
  seed: the snapshot has 7, this run has 8
  data_args: the snapshot has {{'folder': '/data/{LONG}'}}, this run has {{'folder': '/data/b'}}"""


def letters(text: str) -> str:
    return "".join(character for character in text if character.isalnum() or character in "[]…")


@pytest.fixture(params=[60, 80, 200])
def console(request: pytest.FixtureRequest) -> Console:
    """Like that of a run's view, whose lines the terminal wraps."""
    return Console(width=request.param, file=io.StringIO(), force_terminal=False, soft_wrap=True)


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


@pytest.mark.parametrize(("over", "told"), [(None, False), (1, True)])
def test_the_way_back_is_told_where_there_is_one(console: Console, over: int | None, told: bool) -> None:
    decision = compare({"acc": 0.9}, {"acc": 0.8} if over else None, metric="acc", mode="max", over=over)
    report = NightlyReport(
        job="digits", date="2026-03-01", run="a", url="runs/a", decision=decision, champion="a", weights="w"
    )
    show_nightly_report(console, report)
    assert (letters("midstride champion rollback runs") in shown(console)) == told


def test_runs_are_told_apart(console: Console) -> None:
    show_runs(console, "runs", [RunSummary(name=f"a-{LONG}", job="digits", state="done", best=(LONG, 0.5))], now=0.0)
    assert "…" not in shown(console)


@pytest.mark.parametrize("reason", EndReason)
def test_each_end_is_told_with_its_sentence(reason: EndReason, console: Console) -> None:
    why = f"{reason.value}: val/loss has not improved by 0.001 for 5 validations, best 0.231 at epoch 14"
    outcome = {EndReason.STOPPED: "stopped", EndReason.FAILED: "died"}.get(reason, "done")
    report = Report(job="digits", run="a", url="u", outcome=outcome, ended_by=reason.value, why=why)
    show_report(console, report)
    assert letters(why) in shown(console)
    assert why in markdown_of(report)
    table = Console(width=200, file=io.StringIO())
    show_runs(table, "runs", [RunSummary("a", "digits", outcome, why=why)], now=0.0)
    assert why in table.file.getvalue()  # type: ignore[attr-defined]


def test_no_word_of_a_run_is_broken(console: Console) -> None:
    run = RunSummary("first", "digits", "done", step=1200, epoch=60, best=("val/loss", 0.07), attempts=3, time=0.0)
    show_runs(console, "runs", [run], now=40.0)
    assert isinstance(console.file, io.StringIO)
    said = console.file.getvalue()
    for word in ("first", "digits", "done", "1,200", "val/loss 0.07", "40.0 s ago"):
        assert word in said


@pytest.mark.parametrize(("width", "lines"), [(100, 3), (40, 3)])
def test_a_wide_table_becomes_blocks_with_whole_heads(width: int, lines: int) -> None:
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    row = ("000000000078.0003-g000002", "78", "11-24 15:48:03", "committed")
    columns, texts = ("snapshot", "step", "taken", "state"), ("snapshot", "taken", "state")
    show_table(console, "runs/first", columns, [row], texts, heads=("snapshot", "state"))
    assert isinstance(console.file, io.StringIO)
    said = console.file.getvalue().splitlines()
    assert len(said) == lines
    for word in row:
        assert word in console.file.getvalue()


def test_epochs_that_are_alike_are_one_line_of_an_audit(capsys: pytest.CaptureFixture[str]) -> None:
    alike = [EpochAudit(number, batches=20, samples=800, expected=800, once=800) for number in range(60)]
    last = EpochAudit(60, batches=3, samples=120, expected=800, once=120, is_over=False)
    show_audit("runs/first", Audit("000000001203-g000001", 1203, 1203, (*alike, last)))
    lines = capsys.readouterr().out.splitlines()
    assert [" ".join(line.split()) for line in lines[1:4]] == [
        "epoch batches samples once repeated missing padding left over verdict",
        "0 to 59 20 800 800 0 0 0 0 each sample once",
        "60 3 800 120 0 0 0 0 each sample once, in progress",
    ]
