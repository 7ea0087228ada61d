"""Command lines of midstride, and the JSON that they print."""

from collections.abc import Sequence
from typing import TypedDict

__all__ = ["WRONG", "Decision", "PreparedData", "RunStatus", "command_line"]

#: exit code after an error that a retry cannot help: the job or its code is wrong
WRONG = 2


class PreparedData(TypedDict):
    """Result of `midstride prepare`: the folder of the data, and the number, size and names of its files."""

    folder: str | None
    files: int
    bytes: int
    checksum: str


class RunStatus(TypedDict):
    """Result of `midstride status`, and of a training that is done."""

    name: str
    job: str
    state: str
    step: int | None
    epoch: int | None
    best: tuple[str, float] | None
    attempts: int
    time: float | None
    url: str


class Decision(TypedDict):
    """Result of `midstride compare`. The champion is the one after it: this run, if it was promoted."""

    promoted: bool
    why: str
    metric: str
    mode: str
    margin: float
    challenger: dict[str, float]
    champion: dict[str, float]
    over: int | None
    run: str
    champion_run: str | None
    champion_weights: str | None


def command_line(
    command: str, stage: str, job: str, run: str | None, overrides: Sequence[str], *flags: str
) -> list[str]:
    """Return the command line of a stage.

    >>> command_line("midstride", "fit", "job.yaml", "first", ["seed=3"])
    ['midstride', 'fit', 'job.yaml', '--run', 'first', '--set', 'seed=3']
    """
    words = [command, stage, job, *(["--run", run] if run else [])]
    return [*words, *(word for key in overrides for word in ("--set", key)), *flags]
