"""The public laws of what plugs in, kept by what we have: a new store, strategy or launcher is one more row."""

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
from laws import own_strategy
from laws.own_strategy import Averaged
from laws.strategies import Small

from midstride.engine.storage.store import Store
from midstride.engine.testing.laws import LauncherLaws, StoreLaws, StrategyLaws

#: how to find an empty store
URLS: dict[str, Callable[[pytest.FixtureRequest], str]] = {
    "local": lambda request: f"{request.getfixturevalue('tmp_path')}/a",
    "file": lambda request: f"file://{request.getfixturevalue('tmp_path')}/a",
    "memory": lambda request: f"memory://{uuid.uuid4().hex}/a",
    "s3": lambda request: f"{request.getfixturevalue('bucket')}/a",
}


@pytest.mark.parametrize("scheme", URLS)
class TestStores(StoreLaws):
    @pytest.fixture
    def store(self, scheme: str, request: pytest.FixtureRequest) -> Store:
        self.creates_exclusively = scheme != "memory"
        return Store.open(URLS[scheme](request))


class TestAStrategyOfOnesOwn(StrategyLaws):
    options: ClassVar = {"strategy": Small()}


class TestAWholeStrategyOfOnesOwn(StrategyLaws):
    options: ClassVar = {"strategy": Averaged()}


def test_the_page_on_strategies_shows_it() -> None:
    code = Path(own_strategy.__file__).read_text().split('"""\n', 1)[1].strip()
    assert code in (Path(__file__).parents[2] / "docs" / "own-strategy.md").read_text()


@pytest.mark.parametrize("launcher", ["torchrun", "laws.own_launcher:Nice"])
class TestLaunchers(LauncherLaws):
    @pytest.fixture(autouse=True)
    def _launcher(self, launcher: str, forked_worlds: None) -> None:
        self.launcher = launcher
