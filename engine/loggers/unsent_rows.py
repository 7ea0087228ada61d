"""The message about a tracker that does not have all rows of a run. Needs no torch, and no library of a tracker."""

import shlex

__all__ = ["UNSENT_EXIT_CODE", "unsent"]

#: exit code of a process of a logger that has printed what it has not sent
UNSENT_EXIT_CODE = 3


def unsent(name: str, url: str, why: str) -> str:
    """Return a sentence on what the logger `name` has not sent of the run at `url`, with the command that does."""
    return (
        f"{name}: not everything of {url} was sent: {why}. midstride export {shlex.quote(url)} --to {name} sends them"
    )
