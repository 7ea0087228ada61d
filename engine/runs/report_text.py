"""A report in Markdown: the same for a file, an artifact and an e-mail."""

import shlex
from datetime import datetime

from midstride.engine.formatting import format_count, format_number, format_run_name, format_seconds, markdown_table
from midstride.engine.runs.run_report import Interruption, Report

__all__ = ["headline", "lost_steps", "markdown_of", "summary_rows"]

_HEADLINES = {
    "done": "done",
    "running": "running, or its launcher was killed",
    "stopped": "stopped on request; the same command resumes it",
    "user_error": "ended by an error in the job or its code",
    "died": "failed",
    "lost": "lost: its launcher was killed",
    "new": "not started",
}


def markdown_of(report: Report, picture: str | None = None) -> str:
    """Return `report` in Markdown, on failure the cause first.

    Args:
        report: of a run.
        picture: address of the curves, if there are any.
    """
    paragraphs = [f"# {report.job}, run {format_run_name(report.run)}: {headline(report)}"]
    if report.error:
        paragraphs += [_cause(report), f"```\n{report.error.rstrip()}\n```"]
    rows = [(name, value.replace("|", "\\|")) for name, value in summary_rows(report)]
    paragraphs.append(markdown_table(["", ""], rows))
    if picture:
        paragraphs.append(f"![curves]({picture})")
    if report.failures:
        paragraphs += ["## Interruptions", _interruptions(report)]
    if report.rounds:
        paragraphs += ["## Rounds", _rounds(report)]
    return "\n\n".join([*paragraphs, *_remarks(report)]) + "\n"


def _remarks(report: Report) -> list[str]:
    """Return the paragraphs that few runs have, and where the files are."""
    paragraphs = []
    if report.left_out:
        batches = ", ".join(f"{batch} of epoch {epoch}" for epoch, batch in report.left_out)
        paragraphs += [
            "## Left out",
            f"The loss of these batches was not finite; the weights did not change: {batches}.",
        ]
    if report.overridden:
        lines = "\n".join(f"- {name}: {values}" for name, values in report.overridden.items())
        paragraphs += ["## Without effect", f"Settings of the snapshot that stayed in force:\n\n{lines}"]
    if report.slow:
        paragraphs += ["## Slow ranks", "\n".join(f"- {line}" for line in report.slow)]
    if report.files.get("snapshots") and report.steps:
        step, url = report.steps, shlex.quote(report.url)
        commands = f"midstride replay {url} --step {step}\nmidstride fork {url} --run NEW --step {step}"
        paragraphs += ["## Replay or fork", f"```sh\n{commands}\n```"]
    if report.files:
        paragraphs += ["## Files", "\n".join(f"- {name}: `{where}`" for name, where in report.files.items())]
    return paragraphs


def headline(report: Report) -> str:
    """Return how it ended, in a few words."""
    return _HEADLINES[report.outcome]


def summary_rows(report: Report) -> list[tuple[str, str]]:
    """Return the most important facts, two per line."""
    first = {"ended": report.why, "fork of": report.parent and "; ".join([report.parent, *report.settings])}
    rows = [(name, text) for name, text in first.items() if text]
    rows += [(f"test: {name}", format_number(value)) for name, value in report.test.items()]
    if report.monitor in report.best:
        rows.append((f"best {report.monitor}", format_number(report.best[report.monitor])))
    if report.previous:
        run, value = report.previous
        rows.append(("best of other runs", f"{format_number(value)} ({format_run_name(run)})"))
    rows.append(("steps", f"{report.steps:,} in {format_count(report.epochs, 'epoch')}"))
    if report.outcome == "running" and report.time:
        rows.append(("last sign", datetime.fromtimestamp(report.time).strftime("%Y-%m-%d %H:%M:%S")))
    if report.seconds:  # of attempts; a script's run has none
        rows.append(("time", format_seconds(report.seconds)))
    rows.append(("snapshots", f"{report.snapshots} taken"))
    if report.gaps:
        rows.append(("gaps", "; ".join(report.gaps)))
    if report.set_aside:
        rows.append(("set aside", "; ".join(f"{name}: {why}" for name, why in report.set_aside.items())))
    rows.append(("restarts", str(report.restarts)))
    if report.rounds:
        rows.append(("rounds", f"{len(report.rounds)}, the last on {', '.join(report.rounds[-1].nodes)}"))
    return rows


def lost_steps(failure: Interruption) -> str:
    """Write how many steps had to be made again."""
    if failure.steps_lost is None:
        return ""
    return f"{failure.steps_lost}" if failure.certain else f"about {failure.steps_lost}"


def _cause(report: Report) -> str:
    last = report.failures[-1] if report.failures else None
    if last is None or (last.rank is None and last.step is None):
        return "**Cause**"
    where = [f"rank {last.rank}"] if last.rank is not None else []
    where += [f"after step {last.step}"] if last.step is not None else []
    return f"**Cause** ({', '.join(where)})"


def _interruptions(report: Report) -> str:
    head = ("attempt", "cause", "step", "went on from", "steps lost", "seconds lost")
    rows = [
        (
            str(failure.attempt),
            failure.cause.replace("|", "\\|"),
            "" if failure.step is None else str(failure.step),
            "" if failure.resumed_step is None else f"step {failure.resumed_step}",
            lost_steps(failure),
            "" if failure.seconds_lost is None else f"{failure.seconds_lost:.1f}",
        )
        for failure in report.failures
    ]
    return markdown_table(head, rows)


def _rounds(report: Report) -> str:
    head = ("attempt", "round", "nodes", "ranks", "went on from", "since")
    rows = [
        (
            *(str(one.attempt), str(one.number), ", ".join(one.nodes), str(one.ranks)),
            *(one.resumed_from or "", one.why.replace("|", "\\|")),
        )
        for one in report.rounds
    ]
    return markdown_table(head, rows)
