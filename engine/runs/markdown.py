"""A report in Markdown: the same for a file, an artifact and an e-mail."""

from midstride.engine.runs.report import Failure, Report

__all__ = ["facts_of", "headline", "lost_steps", "markdown_of", "number", "seconds", "size"]

_HEADLINES = {
    "done": "done",
    "stopped": "stopped on request; the same command resumes it",
    "user_error": "ended by an error in the job or its code",
    "died": "failed",
    "lost": "lost: whoever launched it was killed",
    "new": "not started",
}


def markdown_of(report: Report, picture: str | None = None) -> str:
    """Return `report` in Markdown, on failure the cause first.

    Args:
        report: of a run.
        picture: address of the curves, if there are any.
    """
    parts = [f"# {report.job}, run {report.run}: {headline(report)}"]
    if report.error:
        parts += [_cause(report), f"```\n{report.error.rstrip()}\n```"]
    parts.append(_table([("", ""), *facts_of(report)]))
    if picture:
        parts.append(f"![curves]({picture})")
    if report.failures:
        parts += ["## Interruptions", _interruptions(report)]
    if report.left_out:
        batches = ", ".join(f"{batch} of epoch {epoch}" for epoch, batch in report.left_out)
        parts += ["## Left out", f"The loss of these batches was not finite; they moved nothing: {batches}."]
    if report.overridden:
        lines = "\n".join(f"- {name}: {values}" for name, values in report.overridden.items())
        parts += ["## Without effect", f"The snapshot brought along what the run began with:\n\n{lines}"]
    if report.slow:
        parts += ["## Slow ranks", "\n".join(f"- {words}" for words in report.slow)]
    if report.files:
        parts += ["## Files", "\n".join(f"- {name}: `{where}`" for name, where in report.files.items())]
    return "\n\n".join(parts) + "\n"


def headline(report: Report) -> str:
    """Return how it ended, in a few words."""
    return _HEADLINES[report.outcome]


def facts_of(report: Report) -> list[tuple[str, str]]:
    """Return what a person wants to know first, in lines of two."""
    facts = [(f"test: {name}", number(value)) for name, value in report.test.items()]
    if report.monitor in report.best:
        facts.append((f"best {report.monitor}", number(report.best[report.monitor])))
    if report.previous:
        run, value = report.previous
        facts.append(("best of other runs", f"{number(value)} ({run})"))
    facts += [("steps", f"{report.steps:,} in {report.epochs} epochs"), ("time", seconds(report.seconds))]
    facts.append(("snapshots", f"{report.snapshots} taken"))
    if report.gaps:
        facts.append(("gaps", "; ".join(report.gaps)))
    if report.set_aside:
        facts.append(("set aside", "; ".join(f"{name}: {why}" for name, why in report.set_aside.items())))
    facts.append(("restarts", str(report.restarts)))
    return facts


def number(value: float) -> str:
    """Write a measured value.

    >>> number(0.98765), number(12.0)
    ('0.9877', '12')
    """
    return f"{value:.4g}"


def seconds(value: float | None) -> str:
    """Write a duration.

    >>> seconds(75.2), seconds(3.04), seconds(0.0123), seconds(36_725.0), seconds(None)
    ('1 min 15 s', '3.0 s', '12 ms', '10 h 12 min', '')
    """
    if value is None:
        return ""
    if value < 60:
        return f"{value:.1f} s" if value >= 0.1 or not value else f"{value * 1000:.0f} ms"
    minutes = int(value) // 60
    return f"{minutes} min {int(value) % 60} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def size(value: int) -> str:
    """Write a number of bytes.

    >>> size(512), size(1_250_000), size(3 * 10**9)
    ('512 bytes', '1.25 MB', '3 GB')
    """
    for unit, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if value >= unit:
            return f"{value / unit:.3g} {name}"
    return f"{value} bytes"


def lost_steps(failure: Failure) -> str:
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
    return _table([head, *rows])


def _table(rows: list[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])
