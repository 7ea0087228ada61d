"""The position of a run, as counts of consumed batches, steps and epochs."""

from dataclasses import asdict, dataclass, fields
from typing import Any

from midstride.engine.session.ending import Ending

__all__ = ["Progress"]


@dataclass
class Progress:
    """The position of a run. Counts are of *consumed* batches; prefetched ones do not count.

    Args:
        epoch: epochs completed.
        batch: training batches of this epoch that every rank has trained on.
        step: optimizer steps taken.
        after: boundaries since the last step: batches of a validation, the end of an epoch.
        in_epoch: whether the start hooks of this epoch have run.
        at_end: whether the last batch of this epoch was trained on.
        validated: the batch of this epoch after which a validation was last completed; 0 if none was.
        val_loader: number of the validation loader that the running validation reads.
        val_batch: batches consumed of that loader.
        validating: whether a validation is running.
        stop: whether early stopping or the user requested an end at the next boundary.
        finished: whether the fit is complete.
        ended_by: why it ended, or who requested the end: an `EndReason`; empty before.
        why: the same as a sentence.
        skipped: batches at the start of this epoch whose training step returned no loss.
        earlier_batches: training batches of the epochs completed.
    """

    epoch: int = 0
    batch: int = 0
    step: int = 0
    after: int = 0
    in_epoch: bool = False
    at_end: bool = False
    validated: int = 0
    validating: bool = False
    val_loader: int = 0
    val_batch: int = 0
    stop: bool = False
    finished: bool = False
    ended_by: str = ""
    why: str = ""
    skipped: int = 0
    earlier_batches: int = 0

    def begin_epoch(self) -> None:
        """Record that the start hooks of the epoch are about to run."""
        self.in_epoch = True

    def batch_done(self, *, at_end: bool, stepped: bool) -> None:
        """Count a training batch, a step if it `stepped`, and the epoch's last batch (`at_end`)."""
        self.batch += 1
        self.at_end = at_end
        if stepped:
            self.step += 1
            self.after = 0

    def batch_skipped(self) -> None:
        """Count one training batch of this epoch whose step returned no loss."""
        self.skipped += 1

    def boundary_passed(self) -> None:
        """Count one boundary since the last step."""
        self.after += 1

    def begin_validation(self) -> None:
        """Set the position to the first batch of a validation."""
        self.validating, self.val_loader, self.val_batch = True, 0, 0

    def validation_batch_done(self) -> None:
        """Count one batch of a validation, which is also a boundary."""
        self.val_batch += 1
        self.after += 1

    def next_validation_loader(self) -> None:
        """Set the position to the first batch of the next validation loader."""
        self.val_loader, self.val_batch = self.val_loader + 1, 0

    def end_validation(self) -> None:
        """Record that no validation is running; its last hooks can still run."""
        self.validating = False

    def validation_done(self) -> None:
        """Record that a validation is complete after this batch of the epoch."""
        self.validated = self.batch

    def request_stop(self, ending: Ending) -> None:
        """Request the end of the fit at the next boundary; the first request counts."""
        if not self.stop:
            self.ended_by, self.why = ending.reason.value, ending.sentence
        self.stop = True

    def withdraw_stop(self) -> None:
        """Withdraw the request to end the fit."""
        self.stop, self.ended_by, self.why = False, "", ""

    def begin_fit(self) -> None:
        """Record that training starts or continues."""
        self.finished = False

    def end_fit(self, ending: Ending) -> None:
        """Record that the fit is complete, and why it ended."""
        self.finished = True
        self.ended_by, self.why = ending.reason.value, ending.sentence

    def next_epoch(self) -> None:
        """Count one completed epoch."""
        self.epoch += 1
        self.earlier_batches += self.batch
        self.batch = 0
        self.validated = self.skipped = 0
        self.in_epoch = self.at_end = False
        self.after += 1

    def state_dict(self) -> dict[str, Any]:
        """Return all counts by name."""
        return asdict(self)

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore all counts."""
        for field in fields(self):
            if field.name in state_dict:
                setattr(self, field.name, state_dict[field.name])
