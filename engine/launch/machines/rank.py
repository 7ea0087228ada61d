"""Rank of a node: `python -m midstride.engine.launch.machines.rank FOLDER`, its session."""

import os
import sys

from midstride.engine.launch.rank import main as rank_main
from midstride.engine.session.session import Session
from midstride.engine.world import World

__all__ = ["main"]


def main() -> None:
    """Run the rank that the environment names, in its round."""
    session = Session(sys.argv[1]).of_round(int(os.environ[World.ROUND]))
    sys.argv[1] = str(session.folder)
    rank_main()


if __name__ == "__main__":
    main()
