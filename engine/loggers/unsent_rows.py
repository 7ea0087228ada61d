"""What is said of a tracker that does not have all rows of a run. Needs no torch, and nothing of a tracker."""

import shlex

__all__ = ["TOLD", "unsent"]

#: what the process of a logger ends with that has said itself what is missing
TOLD = 3


def unsent(name: str, url: str, why: str) -> str:
    """Return a sentence on what the logger `name` has not sent of the run at `url`, with the command that does."""
    return (
        f"{name}: not everything of {url} was sent: {why}. midstride export {shlex.quote(url)} --to {name} sends them"
    )
