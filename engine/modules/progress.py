"""Progress: where a run stands. The only thing in the engine that counts."""

from dataclasses import asdict, dataclass, fields
from typing import Any

__all__ = ["Progress"]


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
        stop: early stopping or the user asked to stop at the next boundary.
        finished: the fit came to its own end.
        skipped: batches of this epoch, from its first on, whose training step returned no loss.
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

    def stepped(self) -> None:
        """Count one optimizer step."""
        self.step += 1
        self.after = 0

    def next_epoch(self) -> None:
        """Count one completed epoch."""
        self.epoch += 1
        self.batch = 0
        self.validated = self.skipped = 0
        self.in_epoch = self.at_end = False
        self.after += 1

    def state_dict(self) -> dict[str, Any]:
        """Return every count by name; `skipped` where there is something to count, as older snapshots have none."""
        counts = asdict(self)
        return counts if self.skipped else {name: count for name, count in counts.items() if name != "skipped"}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Take every count back."""
        for field in fields(self):
            setattr(
                self, field.name, state_dict.get(field.name, 0) if field.name == "skipped" else state_dict[field.name]
            )
