"""The public laws of what plugs in, kept by what we have: a new store, strategy or launcher is one more row."""

import uuid
from collections.abc import Callable
from typing import ClassVar

import pytest
from laws.strategies import Small

from midstride.engine.storage.store import Store
from midstride.engine.testing.laws import LauncherLaws, StoreLaws, StrategyLaws

#: how to find a place that is empty
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


@pytest.mark.parametrize("launcher", ["spawn", "torchrun"])
class TestLaunchers(LauncherLaws):
    @pytest.fixture(autouse=True)
    def _launcher(self, launcher: str) -> None:
        self.launcher = launcher
