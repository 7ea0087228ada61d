"""A busy machine: `python tests/support/load.py 8 COMMAND...` runs a command beside that many processes that spin."""

import os
import subprocess
import sys

from midstride.engine.processes.lifetime import die_with_parent


def _spin(parent: int) -> None:
    die_with_parent(parent)
    while True:
        pass


def main() -> int:
    """Return the command's exit code."""
    for _ in range(int(sys.argv[1])):
        parent = os.getpid()
        if os.fork() == 0:
            _spin(parent)
    return subprocess.run(sys.argv[2:], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
