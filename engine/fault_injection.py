"""Injects faults at a rank, step and phase: kill, raise or hang.

For tests and rehearsals.

A plan is a file, so that it reaches every rank of a world however it was launched, and each of
its faults fires once over all the attempts of a run. A plan that did not fire has shown nothing:
`FaultPlan.assert_all_fired` says so.
"""

import json
import os
import signal
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Protocol

__all__ = ["PHASES", "RESUME_PHASES", "Fault", "FaultPlan", "InjectedFault", "PhaseWatcher"]

VARIABLE = "MIDSTRIDE_FAULTS"

#: the points of a run at which a fault can strike; not at "optimizer_step", where a module steps its optimizers by hand
PHASES = (
    "fetch",
    "forward",
    "backward",
    "optimizer_step",
    "validation",
    "snapshot_write",
    "before_commit",
    "epoch_end",
    "after_step",
)

#: the points of a resume at which a fault of step 0 can strike
RESUME_PHASES = ("resume_plan", "resume_read", "resume_agree")


#: SIGKILL, SIGTERM, SIGUSR1, SIGSTOP (until SIGCONT); an exception; waiting for ever
Kind = Literal["kill", "crash", "stop", "snapshot", "freeze", "raise", "hang"]
_SIGNALS = {
    "kill": signal.SIGKILL,
    "crash": signal.SIGSEGV,
    "stop": signal.SIGTERM,
    "snapshot": signal.SIGUSR1,
    "freeze": signal.SIGSTOP,
}


class PhaseWatcher(Protocol):
    """Receives the phases of a run: a plan of faults, or a replay."""

    def at(self, rank: int, step: int, phase: str, *given: object) -> None:
        """Act at `phase`, with `step` steps done; "backward" is given the loss."""


class InjectedFault(RuntimeError):
    """Raised by a fault of kind "raise"."""


@dataclass(frozen=True)
class Fault:
    """One fault: its kind, rank and place.

    Args:
        kind: the rank's action on itself: see `Kind`.
        rank: whom it strikes.
        step: it strikes once so many steps are done,
        phase: the next time this phase is reached,
        visit: or so many times later.
    """

    kind: Kind
    rank: int
    step: int
    phase: str
    visit: int = 0


class FaultPlan:
    """A list of faults in a folder; a fired fault leaves a file there.

    Args:
        folder: a new folder, or that of an earlier plan.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self._visits: dict[int, int] = {}
        path = self.folder / "plan.json"
        self.faults = [Fault(**fault) for fault in json.loads(path.read_text())] if path.exists() else []

    @classmethod
    def from_environment(cls) -> "FaultPlan | None":
        """Return the plan that `MIDSTRIDE_FAULTS` names, if it is set."""
        folder = os.environ.get(VARIABLE)
        return cls(folder) if folder else None

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables by which ranks follow this plan."""
        return {VARIABLE: str(self.folder)}

    def add(self, kind: Kind, *, rank: int = 0, step: int, phase: str, visit: int = 0) -> "FaultPlan":
        """Add a fault; returns the plan, so that calls can be chained."""
        if phase not in (known := (*PHASES, *RESUME_PHASES)):
            raise ValueError(f"no phase {phase!r}: choose one of {', '.join(known)}")
        self.faults.append(Fault(kind, rank, step, phase, visit))
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "plan.json").write_text(json.dumps([asdict(fault) for fault in self.faults]))
        return self

    def at(self, rank: int, step: int, phase: str, *given: object) -> None:
        """Strike here, if the plan says so and it has not yet done so in this or an earlier attempt."""
        for number, fault in enumerate(self.faults):
            if fault.rank != rank or fault.phase != phase or step < fault.step:
                continue
            self._visits[number] = self._visits.get(number, -1) + 1
            if self._visits[number] != fault.visit:
                continue
            try:
                with self._mark(number).open("x") as mark:
                    mark.write(str(os.getpid()))
            except FileExistsError:
                continue
            self._strike(fault)

    def _strike(self, fault: Fault) -> None:
        if fault.kind in _SIGNALS:
            os.kill(os.getpid(), _SIGNALS[fault.kind])
        elif fault.kind == "hang":
            threading.Event().wait()
        else:
            raise InjectedFault(f"injected at rank {fault.rank}, step {fault.step}, {fault.phase}")

    def _mark(self, number: int) -> Path:
        return self.folder / f"fired-{number:03d}"

    def wake(self) -> None:
        """Wake the ranks that froze."""
        for number, fault in enumerate(self.faults):
            if fault.kind == "freeze" and self._mark(number).exists():
                os.kill(int(self._mark(number).read_text()), signal.SIGCONT)

    def fired(self) -> list[Fault]:
        """Return the faults that have struck."""
        return [fault for number, fault in enumerate(self.faults) if self._mark(number).exists()]

    def assert_all_fired(self) -> None:
        """Fail when a fault of the plan never struck: the test then shows nothing."""
        silent = [fault for number, fault in enumerate(self.faults) if not self._mark(number).exists()]
        assert not silent, f"these faults never struck: {silent}"
