"""Progress: what each event of a run changes of where it stands."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest

from midstride.engine.modules.progress import Progress
from midstride.engine.session.ending import Ending, EndReason

EARLY = Ending(EndReason.EARLY_STOPPING, "early")
MIDDLE = Progress(epoch=2, batch=3, step=9, after=1, in_epoch=True, validated=1, skipped=1, earlier_batches=8)

#: event -> what it changes of a run in the middle of an epoch
EVENTS: dict[str, tuple[Callable[[Progress], None], dict[str, Any]]] = {
    "the next batch": (lambda p: p.batch_done(at_end=False, stepped=False), {"batch": 4}),
    "the last batch": (lambda p: p.batch_done(at_end=True, stepped=False), {"batch": 4, "at_end": True}),
    "a batch without a loss": (Progress.batch_skipped, {"skipped": 2}),
    "a step": (lambda p: p.batch_done(at_end=False, stepped=True), {"batch": 4, "step": 10, "after": 0}),
    "a boundary between steps": (Progress.boundary_passed, {"after": 2}),
    "a validation begins": (Progress.begin_validation, {"validating": True}),
    "a batch of it": (Progress.validation_batch_done, {"val_batch": 1, "after": 2}),
    "its next loader": (Progress.next_validation_loader, {"val_loader": 1}),
    "it is complete": (Progress.validation_done, {"validated": 3}),
    "a stop": (lambda p: p.request_stop(EARLY), {"stop": True, "ended_by": "early_stopping", "why": "early"}),
    "the end of the fit": (
        lambda p: p.end_fit(EARLY),
        {"finished": True, "ended_by": "early_stopping", "why": "early"},
    ),
    "the next epoch": (
        Progress.next_epoch,
        {
            **{"epoch": 3, "batch": 0, "validated": 0, "skipped": 0, "in_epoch": False, "after": 2},
            "earlier_batches": 11,
        },
    ),
}


@pytest.mark.parametrize("event", EVENTS)
def test_an_event_changes_this_and_nothing_else(event: str) -> None:
    happens, changed = EVENTS[event]
    progress = Progress(**asdict(MIDDLE))
    happens(progress)
    assert asdict(progress) == {**asdict(MIDDLE), **changed}


def test_a_restarted_validation_starts_at_its_first_batch() -> None:
    progress = Progress(val_loader=1, val_batch=5)
    progress.begin_validation()
    assert (progress.val_loader, progress.val_batch) == (0, 0)
    progress.end_validation()
    assert not progress.validating


@pytest.mark.parametrize("progress", [MIDDLE, Progress(), Progress(epoch=1, stop=True, finished=True)])
def test_every_count_comes_back(progress: Progress) -> None:
    other = Progress(skipped=7, earlier_batches=7)
    other.load_state_dict(progress.state_dict())
    assert other == progress
