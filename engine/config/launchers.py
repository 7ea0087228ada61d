"""Table of launchers: names and classes. Reading it imports none of them."""

__all__ = ["LAUNCHERS"]

#: name -> where the class lives
LAUNCHERS: dict[str, str] = {
    "horovodrun": "midstride.engine.launch.launchers.horovodrun:Horovodrun",
    "inline": "midstride.engine.launch.launchers.inline:Inline",
    "join": "midstride.engine.launch.launchers.join:Join",
    "spawn": "midstride.engine.launch.launchers.spawn:Spawn",
    "torchrun": "midstride.engine.launch.launchers.torchrun:Torchrun",
}
