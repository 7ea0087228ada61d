"""A copy of the checkout in which bugs are planted, and its tests run, without touching the original."""

import ast
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from mutants.mutant import Checkout, Mutant


@dataclass
class Verdict:
    """How the tests of a row ended.

    Args:
        code: of pytest: 0 all passed, 1 some failed, else they could not be run.
        failed: the tests that failed.
        taken_s: what each test took.
        output: what pytest printed.
    """

    code: int
    failed: list[str] = field(default_factory=list)
    taken_s: dict[str, float] = field(default_factory=dict)
    output: str = ""


class Copy:
    """A copy of what git knows or would add.

    Args:
        root: of the checkout.
        folder: where the copy is made.
    """

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self._scratch = folder / "checkout", folder / "scratch"
        listing = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.check_output(listing, text=True).rstrip("\0").split("\0"):
            if (root / name).exists():  # else it is removed and not yet committed
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, self.root / name, follow_symlinks=False)
        self.checkout = Checkout(self.root)
        # Python compares compiled files by time and size, and a planted bug may keep both: each gets its own time.
        self._times = itertools.count(1)

    @contextmanager
    def planted(self, mutant: Mutant) -> Iterator[None]:
        """Have the bug in the copy while the block runs."""
        file, tree = self.checkout.planted(mutant)
        source = file.read_text()
        self._put(file, ast.unparse(tree))
        try:
            yield
        finally:
            self._put(file, source)

    def _put(self, file: Path, text: str) -> None:
        file.write_text(text)
        time = next(self._times)
        os.utime(file, (time, time))

    def tested(self, arguments: list[str], limit_s: float) -> Verdict:
        """Run pytest with `arguments` in a fork of this process, which has imported what takes long.

        Args:
            arguments: the tests.
            limit_s: what each of them may take.
        """
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._scratch.mkdir()
        output, reports = self._scratch / "output", self._scratch / "reports"
        reports.touch()
        if (child := os.fork()) == 0:
            try:
                os.setpgid(0, 0)  # its processes are told apart by their group
                os._exit(self._run([f"--timeout={limit_s}", *arguments], output, reports))
            except BaseException as error:
                print(error, file=sys.stderr)
                os._exit(3)
        _, status = os.waitpid(child, 0)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(status)
        verdict = Verdict(code, output=output.read_text(errors="replace"))
        for line in reports.read_text().splitlines():
            test, has_failed, taken_s = json.loads(line)
            verdict.failed += [test] if has_failed else []
            verdict.taken_s[test] = verdict.taken_s.get(test, 0.0) + taken_s
        return verdict

    def _run(self, arguments: list[str], output: Path, reports: Path) -> int:
        with output.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        packages = str(self.root / ".types")  # holds links to engine, tasks and flows, found before what is installed
        sys.path.insert(0, packages)
        os.environ["PYTHONPATH"] = packages
        os.chdir(self.root)
        temporary = f"--basetemp={self._scratch / 'tests'}"
        options = ["-q", "-x", "--tb=short", "--no-header", "-p", "no:cacheprovider", temporary]
        return int(pytest.main([*options, *arguments], plugins=[_Reports(reports)]))


class _Reports:
    """Notes how each part of a test ended and what it took."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps([report.nodeid, report.failed, report.duration]) + "\n")
