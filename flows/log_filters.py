"""What the log of a run says of our errors: their words, once, and not the stack around them, which is Prefect's."""

import logging

from midstride.engine.errors import EngineError

__all__ = ["HideEngineTracebacks", "hide_engine_tracebacks"]

_LOGGERS = ("prefect.flow_runs", "prefect.task_runs")


class HideEngineTracebacks(logging.Filter):
    """Drops an error of ours with its stack: the line on the state that it ends in has the same words."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Say whether `record` is let through."""
        return not (record.exc_info and isinstance(record.exc_info[1], EngineError))


def hide_engine_tracebacks() -> None:
    """Keep stacks that say nothing to a reader out of the logs of runs; for the rest of this process."""
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(HideEngineTracebacks())
