"""A copy of the checkout in which bugs are planted, and its tests run, without touching the original."""

import itertools
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
from mutants.mutant import Mutant

__all__ = ["Copy", "Verdict"]


@dataclass
class Verdict:
    """How the tests of a row ended.

    Args:
        code: of pytest: 0 all passed, 1 some failed, else they could not be run.
        failed: the tests that failed.
        output: what pytest printed.
    """

    code: int
    failed: list[str] = field(default_factory=list)
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
        # Compiled files are compared by time and size, and a planted bug may have both: each gets a time of its own.
        self._times = itertools.count(1)

    @contextmanager
    def planted(self, mutant: Mutant) -> Iterator[None]:
        """Have the bug in the copy while the block runs."""
        file = self.root / mutant.file
        source = file.read_text()
        self._put(file, mutant.planted(source))
        try:
            yield
        finally:
            self._put(file, source)

    def _put(self, file: Path, text: str) -> None:
        file.write_text(text)
        time = next(self._times)
        os.utime(file, (time, time))

    def tested(self, arguments: list[str]) -> Verdict:
        """Run pytest with `arguments` in a fork of this process, which has imported what takes long."""
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._scratch.mkdir()
        output, failed = self._scratch / "output", self._scratch / "failed"
        failed.touch()
        if (child := os.fork()) == 0:
            try:
                os.setpgid(0, 0)  # its processes are told apart by their group
                os._exit(self._run(arguments, output, failed))
            except BaseException as error:
                print(error, file=sys.stderr)
                os._exit(3)
        _, status = os.waitpid(child, 0)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(status)
        return Verdict(code, failed.read_text().splitlines(), output.read_text(errors="replace"))

    def _run(self, arguments: list[str], output: Path, failed: Path) -> int:
        with output.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        packages = str(self.root / ".types")  # holds links to engine, tasks and flows, found before what is installed
        sys.path.insert(0, packages)
        os.environ["PYTHONPATH"] = packages
        os.chdir(self.root)
        temporary = f"--basetemp={self._scratch / 'tests'}"
        options = ["-q", "-x", "--tb=short", "--no-header", "-p", "no:cacheprovider", "--timeout=60", temporary]
        return int(pytest.main([*options, *arguments], plugins=[_Failures(failed)]))


class _Failures:
    """Notes the tests that fail."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            with self._file.open("a") as file:
                file.write(f"{report.nodeid}\n")
