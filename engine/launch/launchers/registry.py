"""Launchers by name. A row is data: nothing is imported until its name is asked for."""

from importlib import import_module
from typing import TYPE_CHECKING

from midstride.engine.errors import JobError

if TYPE_CHECKING:
    from midstride.engine.launch.launchers.base import Launcher

__all__ = ["LAUNCHERS", "build_launcher"]

#: name -> where the class lives
LAUNCHERS: dict[str, str] = {
    "horovodrun": "midstride.engine.launch.launchers.horovodrun:Horovodrun",
    "inline": "midstride.engine.launch.launchers.inline:Inline",
    "spawn": "midstride.engine.launch.launchers.spawn:Spawn",
    "torchrun": "midstride.engine.launch.launchers.torchrun:Torchrun",
}


def build_launcher(name: str) -> "Launcher":
    """Return the launcher called `name`."""
    if name not in LAUNCHERS:
        raise JobError(f"no launcher {name!r}; there are: {', '.join(sorted(LAUNCHERS))}")
    module, _, attribute = LAUNCHERS[name].partition(":")
    launcher: type[Launcher] = getattr(import_module(module), attribute)
    return launcher()
