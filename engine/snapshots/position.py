"""Places: where in a run a snapshot stands, and how its folder is called."""

import re
from dataclasses import dataclass

__all__ = ["Place", "parse_name", "part_name", "snapshot_name"]

_NAME = re.compile(r"(?P<step>\d{12,})(?:\.(?P<after>\d{4,}))?-g(?P<generation>\d{6,})")


@dataclass(frozen=True, order=True)
class Place:
    """A boundary of a run.

    Args:
        step: optimizer steps done.
        after: boundaries since that step at which nothing was stepped: validation batches, the end of an epoch.
    """

    step: int
    after: int = 0


def snapshot_name(place: Place, generation: int) -> str:
    """Return the folder name of the snapshot that `generation` takes at `place`; names sort as places do.

    >>> snapshot_name(Place(1200), 3), snapshot_name(Place(1200, 17), 3)
    ('000000001200-g000003', '000000001200.0017-g000003')
    """
    after = f".{place.after:04d}" if place.after else ""
    return f"{place.step:012d}{after}-g{generation:06d}"


def parse_name(name: str) -> tuple[Place, int] | None:
    """Return place and generation of a snapshot's folder name; None for any other name."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return Place(int(match["step"]), int(match["after"] or 0)), int(match["generation"])


def part_name(rank: int, size: int) -> str:
    """Return the stem of the files of one rank.

    >>> part_name(0, 2)
    'rank-00000-of-00002'
    """
    return f"rank-{rank:05d}-of-{size:05d}"
