"""What holds for every test of a part: the writers it opened are closed."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.commands import run
from support.snapshot_writers import OPEN

from midstride.engine.snapshots.lease import acquire
from midstride.engine.snapshots.writer import Writer
from midstride.engine.storage.store import Store
from midstride.engine.world import World


@pytest.fixture(autouse=True)
def _closed_writers(_nothing_left_behind: None) -> Iterator[None]:
    yield
    while OPEN:
        assert OPEN.pop().close(100)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "runs" / "digits")


@pytest.fixture
def writer(store: Store) -> Iterator[Writer]:
    writer = Writer(store, acquire(store, None, {}), World(), lambda value: [value], "digits", 100)
    yield writer
    assert writer.close(100)


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[object, str]]:
    """A function that runs a command and returns its exit code and what it prints."""

    def call(*arguments: str) -> tuple[object, str]:
        capsys.readouterr()
        code = run(*arguments)
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return call
