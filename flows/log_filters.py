"""Filters for the logs of runs: an error of ours is logged once, by its message, without the stack of Prefect."""

import logging

from midstride.engine.errors import EngineError

__all__ = ["HideEngineTracebacks", "hide_engine_tracebacks"]

_LOGGERS = ("prefect.flow_runs", "prefect.task_runs")


class HideEngineTracebacks(logging.Filter):
    """Drops records with an error of ours and its stack: the record about the final state has the same message."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether `record` is logged."""
        return not (record.exc_info and isinstance(record.exc_info[1], EngineError))


def hide_engine_tracebacks() -> None:
    """Keep the stacks of our errors out of the logs of runs, for the rest of this process."""
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(HideEngineTracebacks())
