"""The plan of a replay, in the environment, by which it reaches every rank of a world."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["NEVER", "RESULT", "TRACE", "ReplayPlan", "recorded_changes"]

_VARIABLE = "MIDSTRIDE_REPLAY"
#: file of the result, in the folder of the plan
RESULT = "replay.json"
#: file of the trace of each rank there
TRACE = "trace-{rank}.json"
#: steps between snapshots of a replay: it needs none
NEVER = 10**12


@dataclass(frozen=True)
class ReplayPlan:
    """The steps of a replay, and its actions there.

    Args:
        folder: local folder for the result.
        until: the last step, from 1.
        probe: "file.py:function" to call with trainer, module and batch before that step.
        debug: open the debugger there.
        anomaly: raise an error at the first value that is not finite.
        at_gradients: end with the gradients of that step, before its optimizers step.
        snapshots_at: steps after which to take a snapshot.
        trace: whether to write digests of each step.
        operations: whether to write those of each operation of torch, too.
        recorded: versions, hardware and code of the run, which a rank must have; None accepts all.
    """

    folder: str
    until: int
    probe: str = ""
    debug: bool = False
    anomaly: bool = False
    at_gradients: bool = False
    snapshots_at: tuple[int, ...] = ()
    trace: bool = False
    operations: bool = False
    recorded: dict[str, Any] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """Variables for the ranks that follow this plan."""
        return {_VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls) -> "ReplayPlan | None":
        """Return the plan of the environment; None without one."""
        text = os.environ.get(_VARIABLE)
        return cls(**json.loads(text)) if text else None


def recorded_changes(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a line for each version, part of the hardware and module of code that differs.

    Modules that only one of them has are ignored: the module that refers to them has changed as well.
    """
    changed = [key for key in now if key != "source" and was.get(key) != now[key]]
    code, code_now = was.get("source", {}), now.get("source", {})
    return [
        *(f"{key} was {was.get(key)}, and is {now[key]}" for key in changed),
        *(f"{name} has changed" for name, digest in code_now.items() if code.get(name, digest) != digest),
    ]
