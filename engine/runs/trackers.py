"""Sends outcome, test values and report of a run to its trackers."""

from pydantic import ValidationError

from midstride.engine.config.loggers import LoggerOptions
from midstride.engine.errors import SnapshotError
from midstride.engine.loggers.base import Conclusion
from midstride.engine.loggers.delivery import read_run_json
from midstride.engine.loggers.logger_processes import conclude
from midstride.engine.runs.report_text import markdown_of
from midstride.engine.runs.run_report import Report
from midstride.engine.storage.store import Store

__all__ = ["tell_trackers"]


def tell_trackers(store: Store, report: Report, folder: str = "") -> None:
    """Send `report` to the run's trackers. Name an unreachable one on standard error.

    Args:
        store: of the run.
        report: of the run; nothing is sent while it runs.
        folder: of the code of loggers of one's own.
    """
    if report.outcome in ("running", "new"):
        return
    try:
        loggers = [LoggerOptions.model_validate(one) for one in read_run_json(store).get("loggers", [])]
    except (FileNotFoundError, SnapshotError, ValidationError):  # it never trained
        return
    conclusion = Conclusion(
        outcome=report.outcome, why=report.why, step=report.steps, test=report.test, report=markdown_of(report)
    )
    conclude(loggers, store, conclusion, folder)
