"""Progress: where a run stands, by counts of what was consumed."""

from dataclasses import dataclass, fields
from typing import Any

__all__ = ["Progress"]

#: counts that older snapshots lack, 0 there; a snapshot has them where there is something to count
_ADDED = ("skipped", "earlier_batches")


@dataclass
class Progress:
    """Where a run stands; every count is of what was *consumed*, not of what was fetched ahead.

    Args:
        epoch: epochs completed.
        batch: training batches of this epoch that every rank has trained on.
        step: optimizer steps taken.
        after: boundaries since that step (batches of validation, the end of an epoch).
        in_epoch: whether this epoch's start hooks have run.
        at_end: whether its last batch has been trained on.
        validated: the batch of this epoch after which validation was last completed; 0 if none was.
        val_loader: the validation loader being read, while a validation is under way.
        val_batch: batches consumed of that loader.
        validating: whether a validation is under way.
        stop: whether early stopping or the user requested an end at the next boundary.
        finished: whether the fit is complete.
        skipped: batches of this epoch, from its first on, whose training step returned no loss.
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
    skipped: int = 0
    earlier_batches: int = 0

    def begin_epoch(self) -> None:
        """Note that the epoch's start hooks are about to run."""
        self.in_epoch = True

    def batch_done(self, *, at_end: bool, stepped: bool) -> None:
        """Count one training batch, and a step if it `stepped`; `at_end`: it is the epoch's last one."""
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
        """Count one batch of a validation, which is a boundary too."""
        self.val_batch += 1
        self.after += 1

    def next_validation_loader(self) -> None:
        """Set the position to the first batch of the next validation loader."""
        self.val_loader, self.val_batch = self.val_loader + 1, 0

    def end_validation(self) -> None:
        """Note that no validation is under way; its last hooks may still run."""
        self.validating = False

    def validation_done(self) -> None:
        """Note that a validation is complete after this batch of the epoch."""
        self.validated = self.batch

    def request_stop(self) -> None:
        """Request the end of the fit at the next boundary."""
        self.stop = True

    def begin_fit(self) -> None:
        """Note that there is something left to train."""
        self.finished = False

    def end_fit(self) -> None:
        """Note that the fit is complete."""
        self.finished = True

    def next_epoch(self) -> None:
        """Count one completed epoch."""
        self.epoch += 1
        self.earlier_batches += self.batch
        self.batch = 0
        self.validated = self.skipped = 0
        self.in_epoch = self.at_end = False
        self.after += 1

    def state_dict(self) -> dict[str, Any]:
        """Return every count by name; those that older snapshots lack where there is something to count."""
        counts = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: count for name, count in counts.items() if count or name not in _ADDED}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore every count."""
        for field in fields(self):
            setattr(self, field.name, state_dict.get(field.name, 0) if field.name in _ADDED else state_dict[field.name])
