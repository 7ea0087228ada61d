"""The command line `midstride`, also as `python -m midstride.flows`."""

import atexit
import gc
import sys
from typing import NoReturn

from midstride.engine.launch.early_imports import early_imports
from midstride.engine.processes.preload import collector_paused

__all__ = ["main"]


def main() -> NoReturn:
    """Run the command line. A training process imports torch meanwhile."""
    atexit.register(gc.freeze)  # at its end Python looks for garbage in all that is imported by then
    with early_imports(sys.argv[1:]):
        with collector_paused():
            from midstride.flows.cli import main as run_command_line
        run_command_line()


if __name__ == "__main__":
    main()
