"""What a flow tells the server, beside the events in test_train.py, test_cli.py and test_nightly.py."""

import re
import runpy
import tempfile
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from support.flow_events import said
from support.flow_runs import STEPS, wait_for
from support.seaweed import Seaweed

from midstride.engine.config.job import TrainingJob
from midstride.engine.config.options import SnapshotOptions
from midstride.engine.errors import WorldError
from midstride.flows.run_states import failed
from midstride.flows.train import train
from midstride.tasks.events import EVENTS, Event

Make = Callable[..., TrainingJob]
DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "events.md"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank 1 was killed\nrank 0 then said: no answer", "rank 1 was killed\nrank 0 then said: no answer"),
        ("another run:\n  seed: 7, 8\nto start over: x", "another run:\n  seed: 7, 8\nto start over: x"),
        ("Traceback\nKeyError: 'a'\nraised in f", "KeyError: 'a'\n\nTraceback\nKeyError: 'a'\nraised in f"),
    ],
)
def test_a_failed_state_says_its_cause_first_and_once(text: str, message: str) -> None:
    assert failed(WorldError(text)).message == message


def test_a_store_that_is_waited_for_is_told_of(make_job: Make, server: str, own_s3: Seaweed, tmp_path: Path) -> None:
    job = make_job(processes=1, wait_at=8)
    job = job.model_copy(update={"snapshots": SnapshotOptions(url=f"{own_s3.bucket()}/runs", every_steps=5)})

    def freeze_for_a_while() -> None:
        """Until a rank says that it waits: the flow may be reading a snapshot, and tell of it only afterwards."""
        wait_for((tmp_path / "mark").exists, "the step at which the model waits")
        own_s3.freeze()
        (tmp_path / "mark-over").touch()
        try:
            wait_for(_waits, "the rank to wait for the store")
        finally:
            own_s3.thaw()

    freezer = threading.Thread(target=freeze_for_a_while)
    freezer.start()
    report = train(job, "patient")
    freezer.join()
    awaited = said(server, "patient", "store.awaited")
    assert (report.outcome, report.steps, report.restarts) == ("done", STEPS, 0)
    assert awaited[0]["run"] == job.run_url("patient")
    assert awaited[0]["rank"] == 0
    assert awaited[0]["waited_s"] > 0
    assert awaited[0]["why"]


def _waits() -> bool:
    """Whether a rank of the run has told its launcher that it waits for the store."""
    sessions = Path(tempfile.gettempdir()).glob("midstride-patient-*/events.jsonl")
    return any('"waiting"' in events.read_text() for events in sessions)


@cache
def reference() -> str:
    """Return the reference of the site."""
    return str(runpy.run_path(str(DOCS / "hooks/reference.py"))["events"]())


@pytest.mark.parametrize("kind", EVENTS, ids=lambda kind: kind.event)
def test_the_page_says_what_each_event_says(kind: type[Event]) -> None:
    assert len(re.findall(rf"^\| `{kind.event}` \| ", PAGE.read_text(), re.MULTILINE)) == 1
    section = reference().partition(f"## `{kind.event}`\n\n{kind.__doc__}")[2].partition("\n## ")[0]
    for name, field in kind.model_fields.items():
        assert f"| `{name}` | {field.description} |" in section
