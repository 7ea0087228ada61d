"""A rank under horovodrun: `python -m midstride.engine.launch.horovod_rank SESSION`.

Between horovodrun and a rank stand a process of horovodrun's own, in a session of its own, and a shell.
If that process is killed no event tells of it, so a rank watches every process above it.
"""

import os
import sys

from midstride.engine.launch.rank import main as work
from midstride.engine.processes.lifetime import PARENT, exit_with_ancestors
from midstride.engine.session.session import Session

__all__ = ["main"]


def main() -> None:
    """Be the rank that the environment says this process is."""
    os.environ.pop(PARENT, None)  # the supervisor: horovodrun's parent, not ours
    exit_with_ancestors(Session.VARIABLE)
    try:
        work()
    except SystemExit as end:
        if end.code:
            # The first rank to leave so gives the others five seconds; taking Python and Horovod apart takes longer.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code if isinstance(end.code, int) else 1)
        raise


if __name__ == "__main__":
    main()
