"""The names of flows and tasks for everyone's flows, and errors in the log of a run."""

import logging
import subprocess
import sys

import pytest

from midstride.engine.errors import WorldError
from midstride.flows.train import HideEngineTracebacks


@pytest.mark.parametrize(("error", "shown"), [(WorldError("rank 1 was killed"), False), (ValueError("odd"), True)])
def test_stacks_of_errors_of_ours_are_spared(error: Exception, shown: bool) -> None:
    record = logging.LogRecord("any", logging.ERROR, "", 0, "%r", (error,), (type(error), error, None))
    assert HideEngineTracebacks().filter(record) == shown


def test_words_are_never_spared() -> None:
    words = "Finished in state Failed('Flow run encountered an exception: WorldError: rank 1 was killed')"
    assert HideEngineTracebacks().filter(logging.LogRecord("any", logging.ERROR, "", 0, words, (), None))


#: what is done first -> whether Prefect is loaded by then. `train` is a module of its package, too
ORDERS = {
    "import midstride.flows, midstride.tasks": False,
    "from midstride.flows import train, nightly, evaluate": True,
    "import midstride.flows.train, midstride.flows.nightly, midstride.flows.evaluate": True,
    "from midstride.tasks import launch_world, prepare_data": True,
}
SCRIPT = """
import sys
{first}
print("prefect" in sys.modules, "torch" in sys.modules)
from midstride.flows.train import train as same
from midstride.flows import train, nightly, evaluate
from midstride.tasks import prepare_data, launch_world, evaluate_best, compare_and_promote, publish_report
print(train is same, train.name, nightly.name, evaluate.name)
"""


@pytest.mark.parametrize("first", ORDERS)
def test_public_names_are_loaded_when_used(first: str) -> None:
    command = [sys.executable, "-c", SCRIPT.format(first=first)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert said == [str(ORDERS[first]), "False", "True", "train", "nightly", "evaluate"]
