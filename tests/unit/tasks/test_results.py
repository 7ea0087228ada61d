"""Prefect can store what tasks return, and gives a retry the same."""

from typing import Any

import pytest
from prefect.serializers import JSONSerializer, PickleSerializer, Serializer

from midstride.engine.registry.comparison import compare
from midstride.engine.runs.run_report import Interruption, Report
from midstride.engine.storage.listing import list_folder

#: task -> a result of it
RESULTS: dict[str, Any] = {
    "prepare_data": list_folder(None),
    "launch_world": 24,
    "evaluate_best": {"test/accuracy": 0.5},
    "compare_and_promote": compare({"acc": 0.93}, {"acc": 0.91}, metric="acc", mode="max", margin=0.01, over=1),
    "publish_report": Report(
        job="tiny", run="a", url="/runs/a", outcome="done", failures=(Interruption(attempt=1, cause="killed"),)
    ),
}


@pytest.mark.parametrize("task", RESULTS)
@pytest.mark.parametrize("serializer", [JSONSerializer(), PickleSerializer()], ids=["json", "pickle"])
def test_a_result_is_stored_and_found(task: str, serializer: "Serializer[Any]") -> None:
    assert serializer.loads(serializer.dumps(RESULTS[task])) == RESULTS[task]
