"""The ranks of torch's elastic agent as forks of it: torch is imported once, not by each of them."""

import sys
from contextlib import AbstractContextManager
from importlib import import_module

from midstride.engine.launch.launchers.base import RANK_MODULES
from midstride.engine.launch.torch_internals import ranks_started_by
from midstride.engine.processes.forked_program import ForkedProgram
from midstride.engine.processes.preload import preload
from midstride.engine.processes.proc_entry import show_command

__all__ = ["ranks_forked"]


def ranks_forked(module: str) -> AbstractContextManager[None]:
    """Return a block in which agents fork ranks that run `module`; it is imported here, with all that they need."""
    preload(*RANK_MODULES, module)

    def start(command: tuple[str, ...], environment: dict[str, str]) -> ForkedProgram | None:
        if command[:4] != (sys.executable, "-u", "-m", module):
            return None

        def main() -> None:
            sys.argv = [*command[3:]]
            show_command(command)
            import_module(module).main()

        return ForkedProgram(main, environment)

    return ranks_started_by(start)
