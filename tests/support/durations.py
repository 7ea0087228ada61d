"""What tests take: seconds of the clock and of the processor, by folder, by file, and of the slowest, in a file."""

import multiprocessing.forkserver as forkserver
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

SLOWEST = 50
#: under what name the last report of a test says what it took
TAKEN = "taken"
_TICKS_S = os.sysconf("SC_CLK_TCK")


@dataclass
class Sum:
    """Tests, and the seconds they took; `cpu_s` holds those of processes that have ended, too."""

    tests: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0

    def __add__(self, other: "Sum") -> "Sum":
        return Sum(self.tests + other.tests, self.wall_s + other.wall_s, self.cpu_s + other.cpu_s)


@dataclass(eq=False)  # pytest keeps plugins in sets
class Durations:
    """A plugin that measures every test, its fixtures included, and writes `path`."""

    path: Path
    tests: dict[str, Sum] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)
    workers_cpu_s: float = 0.0
    _before: tuple[float, float] = (0.0, 0.0)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self) -> None:
        self._before = time.monotonic(), _cpu_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Iterator[None]:
        """Send what a test took along with its last report: what has ended before Ctrl-C is written, too."""
        report: Any = yield
        if call.when == "teardown":
            wall_s, cpu_s = self._before
            report.user_properties.append((TAKEN, (time.monotonic() - wall_s, _cpu_s() - cpu_s)))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if taken := dict(report.user_properties).get(TAKEN):
            self.tests[report.nodeid] = Sum(1, *taken)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Give what this worker has taken to the process that started it."""
        output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["cpu_s"] = _cpu_s()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Add what a worker took, unless it was killed."""
        self.workers_cpu_s += getattr(node, "workeroutput", {}).get("cpu_s", 0.0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        slowest = sorted(self.tests.items(), key=lambda test: -test[1].wall_s)[:SLOWEST]
        folders, files = self._by(lambda name: str(Path(name).parent)), self._by(str)
        folders["the run"] = self._run()
        table = [*_lines("folder", folders), *_lines("file", files), *_lines("slowest", dict(slowest))]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("".join(f"{line}\n" for line in table))
        terminalreporter.section(f"durations ({self.path})")
        terminalreporter.write("".join(f"{line}\n" for line in _lines("folder", folders)))

    def _by(self, key: Callable[[str], str]) -> dict[str, Sum]:
        sums: dict[str, Sum] = {}
        for name, taken in self.tests.items():
            group = key(name.partition("::")[0])
            sums[group] = sums.get(group, Sum()) + taken
        return {**sums, "all": sum(sums.values(), Sum())}

    def _run(self) -> Sum:
        """What all took: less of the clock than the tests where they ran side by side, more of the processor."""
        return Sum(len(self.tests), time.monotonic() - self.started, self.workers_cpu_s or _cpu_s())


def _lines(title: str, sums: dict[str, Sum]) -> Iterator[str]:
    yield f"{'wall s':>8} {'CPU s':>8} {'tests':>6}  {title}"
    for name, taken in sums.items():
        yield f"{taken.wall_s:8.1f} {taken.cpu_s:8.1f} {taken.tests:6}  {name}"


def _cpu_s() -> float:
    """Return the processor's seconds of this process, of the one that ranks are forked from, and of their children."""
    ours = os.times()
    seconds = ours.user + ours.system + ours.children_user + ours.children_system
    try:
        stat = Path(f"/proc/{forkserver._forkserver._forkserver_pid}/stat").read_text()
    except OSError:  # not started yet
        return seconds
    return seconds + sum(int(ticks) for ticks in stat.rpartition(")")[2].split()[11:15]) / _TICKS_S
