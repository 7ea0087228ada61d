"""Reason for the end of a fit or an attempt: a word for programs, a sentence for people."""

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["STOPPED_BY_CALLBACK", "EndReason", "Ending"]


class EndReason(StrEnum):
    """Reason for the end of a fit or an attempt."""

    MAX_EPOCHS = "max_epochs"
    MAX_STEPS = "max_steps"
    MAX_TIME = "max_time"
    EARLY_STOPPING = "early_stopping"
    CALLBACK = "callback"  #: a callback or the module called `trainer.stop()`
    STOPPED = "stopped"  #: on request: a signal, Pause, a newer attempt
    FAILED = "failed"


@dataclass(frozen=True)
class Ending:
    """End of a fit or an attempt, with its reason.

    Args:
        reason: for programs.
        sentence: for people, such as "max_epochs 40 reached".
    """

    reason: EndReason
    sentence: str


STOPPED_BY_CALLBACK = Ending(EndReason.CALLBACK, "a callback or trainer.stop() ended the training")
