"""Positions: where in a run a snapshot stands, and the names of its folder and files."""

import re
from dataclasses import dataclass

__all__ = ["Position", "file_stem", "lease_name", "parse_name", "rank_stem", "snapshot_name"]

#: numbers have at most 18 digits
_NAME = re.compile(r"(?P<step>\d{12,18})(?:\.(?P<after>\d{4,18}))?-g(?P<generation>\d{6,18})(?:-\d{2,18})?", re.ASCII)


@dataclass(frozen=True, order=True)
class Position:
    """A boundary of a run.

    Args:
        step: optimizer steps done.
        after: boundaries since that step without another step: validation batches, the end of an epoch.
    """

    step: int
    after: int = 0


def snapshot_name(position: Position, generation: int, take: int = 1) -> str:
    """Return the folder name of a snapshot of `generation`; names sort as positions do.

    Weights can be saved several times at one position; `take` counts them, from 1.

    >>> snapshot_name(Position(1200), 3), snapshot_name(Position(1200, 17), 3), snapshot_name(Position(1200), 3, take=2)
    ('000000001200-g000003', '000000001200.0017-g000003', '000000001200-g000003-02')
    """
    after = f".{position.after:04d}" if position.after else ""
    return f"{position.step:012d}{after}-g{generation:06d}{f'-{take:02d}' if take > 1 else ''}"


def parse_name(name: str) -> tuple[Position, int] | None:
    """Return position and generation of a snapshot's folder name; None for any other name."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return Position(int(match["step"]), int(match["after"] or 0)), int(match["generation"])


def lease_name(generation: int) -> str:
    """Return the name of the file of a lease in its folder."""
    return f"{generation:06d}.json"


def rank_stem(rank: int, size: int) -> str:
    """Return the name, without its ending, of the files of one rank in a snapshot.

    >>> rank_stem(0, 2)
    'rank-00000-of-00002'
    """
    return f"rank-{rank:05d}-of-{size:05d}"


def file_stem(of_snapshot: bool, rank: int, size: int) -> str:
    """Return the stem of a rank's files in a snapshot, or in weights as on Hugging Face.

    >>> file_stem(True, 0, 2), file_stem(False, 0, 1), file_stem(False, 0, 2)
    ('rank-00000-of-00002', 'model', 'model-00001-of-00002')
    """
    if of_snapshot:
        return rank_stem(rank, size)
    return "model" if size == 1 else f"model-{rank + 1:05d}-of-{size:05d}"
