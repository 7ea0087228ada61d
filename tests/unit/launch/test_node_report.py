"""A node ends when the launcher has been silent for too long, in time in which the node itself ran."""

import queue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from midstride.engine.launch import watchdog
from midstride.engine.launch.machines import report
from midstride.engine.launch.machines.join import LAUNCHER_GONE
from midstride.engine.launch.machines.report import NodeReport
from midstride.engine.session.session import Session

#: by name: the seconds before the first looks at the clock; there is one before each of the others
GAPS: dict[str, list[float]] = {"never suspended": [], "suspended for days": [0.2, 0.2, 1e6]}


class Unanswered(NodeReport):
    """That of a node whose launcher does not answer; it tells how it ends, and lets the process live."""

    def __init__(self, *arguments: Any) -> None:
        self.ends: queue.Queue[tuple[int, str]] = queue.Queue()
        super().__init__(*arguments)

    def _exchange_messages(self) -> None:
        pass

    def _end(self, code: int, why: str) -> None:
        self.ends.put((code, why))


@pytest.mark.fast
@pytest.mark.parametrize("name", GAPS)
def test_suspension_of_a_node_is_no_silence_of_the_launcher(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gaps, now, looks = [*GAPS[name]], 0.0, 0

    def monotonic() -> float:
        nonlocal now, looks
        now += gaps.pop(0) if gaps else 1.0
        looks += 1
        return now

    clock = SimpleNamespace(monotonic=monotonic, sleep=lambda seconds: None)
    for module in (watchdog, report):
        monkeypatch.setattr(module, "time", clock)
    node = Unanswered(None, 1, Session(tmp_path))
    assert node.ends.get() == (LAUNCHER_GONE, "the launcher has not answered for 30 s")
    assert looks >= 30
