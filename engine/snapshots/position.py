"""Positions: where in a run a snapshot stands, and how its folder is called."""

import re
from dataclasses import dataclass

__all__ = ["Position", "parse_name", "rank_stem", "snapshot_name"]

_NAME = re.compile(r"(?P<step>\d{12,})(?:\.(?P<after>\d{4,}))?-g(?P<generation>\d{6,})")


@dataclass(frozen=True, order=True)
class Position:
    """A boundary of a run.

    Args:
        step: optimizer steps done.
        after: boundaries since that step at which nothing was stepped: validation batches, the end of an epoch.
    """

    step: int
    after: int = 0


def snapshot_name(position: Position, generation: int) -> str:
    """Return the folder name of the snapshot that `generation` takes at `position`; names sort as positions do.

    >>> snapshot_name(Position(1200), 3), snapshot_name(Position(1200, 17), 3)
    ('000000001200-g000003', '000000001200.0017-g000003')
    """
    after = f".{position.after:04d}" if position.after else ""
    return f"{position.step:012d}{after}-g{generation:06d}"


def parse_name(name: str) -> tuple[Position, int] | None:
    """Return position and generation of a snapshot's folder name; None for any other name."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return Position(int(match["step"]), int(match["after"] or 0)), int(match["generation"])


def rank_stem(rank: int, size: int) -> str:
    """Return the stem of the files of one rank.

    >>> rank_stem(0, 2)
    'rank-00000-of-00002'
    """
    return f"rank-{rank:05d}-of-{size:05d}"
