"""Commands of the engine, run in this process."""

import pytest

from midstride.engine.cli.app import main


def run(*arguments: str) -> object:
    """Run a command and return its exit code."""
    with pytest.raises(SystemExit) as ended:
        main(arguments=arguments)
    return ended.value.code
