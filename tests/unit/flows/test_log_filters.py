"""What the log of a run shows of an error."""

import logging

import pytest

from midstride.engine.errors import WorldError
from midstride.flows.log_filters import HideEngineTracebacks


@pytest.mark.parametrize(("error", "shown"), [(WorldError("rank 1 was killed"), False), (ValueError("odd"), True)])
def test_stacks_of_errors_of_ours_are_spared(error: Exception, shown: bool) -> None:
    record = logging.LogRecord("any", logging.ERROR, "", 0, "%r", (error,), (type(error), error, None))
    assert HideEngineTracebacks().filter(record) == shown


def test_words_are_never_spared() -> None:
    words = "Finished in state Failed('Flow run encountered an exception: WorldError: rank 1 was killed')"
    assert HideEngineTracebacks().filter(logging.LogRecord("any", logging.ERROR, "", 0, words, (), None))
