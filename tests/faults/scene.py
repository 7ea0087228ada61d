"""A scene: one run somewhere, its lives, and what those who live them say."""

import logging
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from laws.lives import Setting, assert_alike
from support.flow_runs import wait_for
from support.limit import LIMIT_S
from support.seaweed import Seaweed

from midstride.engine.errors import EngineError
from midstride.engine.fault_injection import FaultPlan
from midstride.engine.snapshots.catalog import SnapshotCatalog
from midstride.engine.storage.store import Store
from midstride.engine.testing import run_ranks


@dataclass
class Scene:
    """A run of `setting` at `url`.

    Args:
        folder: of this test.
        url: of the run; a store of its own.
        setting: how it is trained.
        server: that holds it, if one does.
    """

    folder: Path
    url: str
    setting: Setting
    server: Seaweed | None = None
    codes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.plan = FaultPlan(self.folder / "plan")

    @property
    def newest(self) -> str:
        """The folder of the newest snapshot, below the run's."""
        return f"snapshots/{SnapshotCatalog(Store.open(self.url)).snapshots()[-1].name}"

    @property
    def said(self) -> str:
        """What its ranks have said so far, in all lives."""
        path = self.folder / "said.txt"
        return path.read_text() if path.exists() else ""

    def live(self, before: Callable[[], object] | None = None) -> list[int]:
        """Give the run one life; return its ranks' exit codes. `before` is called in each rank, before it trains."""
        self.codes = run_ranks(
            *(_speaking, self.setting, self.url, self.folder / "said.txt", before),
            processes=self.setting.ranks,
            environment=self._environment,
        )
        return self.codes

    def live_launched(self) -> list[int]:
        """Give the run one life under torchrun; return its agent's exit code."""
        rank = self.folder / "rank.pickle"
        rank.write_bytes(pickle.dumps(partial(_speaking, self.setting, self.url, self.folder / "said.txt", None)))
        agent = [sys.executable, "-m", "midstride.engine.launch.torchrun_agent"]
        ranks = [f"--nproc-per-node={self.setting.ranks}", "-m", "faults.rank", str(rank)]
        environment = {**self._environment, "PYTHONPATH": str(Path(__file__).parents[1])}
        self.codes = [subprocess.run([*agent, *ranks], env=environment, timeout=LIMIT_S, check=False).returncode]
        return self.codes

    @property
    def _environment(self) -> dict[str, str]:
        return {**os.environ, **self.plan.environment, "LAWS_JOURNAL": str(self.folder / "journal.jsonl")}

    def assert_alike(self, undisturbed: Path) -> None:
        """Compare the finished run with one that nothing befell."""
        assert_alike(self.folder, undisturbed, run=self.url)

    @contextmanager
    def once_frozen(self, act: Callable[[int], object]) -> Iterator[None]:
        """While the block runs, wait for a process of the run to freeze, and call `act` with its id."""
        failure: list[BaseException] = []

        def watch() -> None:
            try:
                act(wait_for(_frozen, "a process to freeze")[0])
            except BaseException as error:
                failure.append(error)

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            thread.join()
        if failure:
            raise failure[0]

    def wait_until_said(self, words: str) -> None:
        """Wait until a rank has said something."""
        wait_for(lambda: words in self.said, f"the words {words!r}")


def _speaking(setting: Setting, url: str, said: Path, before: Callable[[], object] | None) -> None:
    """Train, writing down what a person would read."""
    logging.basicConfig(filename=said, format="%(message)s")
    logging.getLogger("midstride").setLevel(logging.INFO)
    if before is not None:
        before()
    try:
        setting.train(url)
    except EngineError as error:
        logging.getLogger(__name__).error("%s", error)
        raise


def _frozen() -> list[int]:
    """The processes of this run of the tests that SIGSTOP holds."""
    token = f"MIDSTRIDE_TESTS={os.environ['MIDSTRIDE_TESTS']}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            stopped = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "T"
            if stopped and token in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue  # it has ended meanwhile
    return found
