"""Prefect tasks, each an operation of the engine with retries, events and artifacts.

Any flow can use five of them:

    from midstride.tasks import prepare_data, launch_world, evaluate_best, compare_and_promote, publish_report

Each takes a job (an object, the path of its file, or its document) and the name of a run. Without a name, tasks of a
flow agree on one that a retry of the flow finds again. See docs/your-own-flow.md.

prepare         `prepare_data`: prepare the data, once for a flow run however often it is retried
launch          `launch_world`: run one training world to its end
evaluate        `evaluate_best`: test the best weights of a run
compare         `compare_and_promote`: make the run champion if it is better
assets          Prefect assets: data, weights, champions, and what each was made from
report          `publish_report`: the report of a run or of a night, as an artifact
job_argument    a job in any of its forms, and the default name of its run
stop_requests   requests to stop that reach every thread: signals, Cancel, Pause
slots           `resources` of a job: slots of Prefect's concurrency limits
monitor         reports a running world to Prefect: its bar, snapshots and validations
run_page        the page of a run among artifacts: its report so far
events          events for automations
credentials     from a Prefect block into the environment, while a flow needs them
detach          a flow that another process started outlives it
resources       names under which Prefect keeps artifacts and events of a run
server_outage   Prefect's server while it does not answer: the end of a flow waits for it
without_retries  Prefect's client asks once, where a world would wait for it
prefect_internals  private names of Prefect, used here only

Tests: tests/unit/tasks, tests/flows
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from midstride.tasks.compare import compare_and_promote
    from midstride.tasks.evaluate import evaluate_best
    from midstride.tasks.launch import launch_world
    from midstride.tasks.prepare import prepare_data
    from midstride.tasks.report import publish_report

__all__ = ["compare_and_promote", "evaluate_best", "launch_world", "prepare_data", "publish_report"]

#: public name -> its module, imported on use: each imports Prefect, which takes a second
_PUBLIC = {
    "compare_and_promote": "compare",
    "evaluate_best": "evaluate",
    "launch_world": "launch",
    "prepare_data": "prepare",
    "publish_report": "report",
}


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)
