"""Law 1 by strategy: every row, killed and resumed, ends with the bits of the run that nothing befell."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from laws.axes import cover
from laws.lives import Setting, Tangled, assert_alike, live
from laws.strategies import ROWS
from torch import Tensor, nn

from midstride.engine.errors import UserError
from midstride.engine.fault_injection import FaultPlan
from midstride.engine.testing import run_ranks

#: a row, its ranks and its modules
PRODUCT = [(name, ranks, module) for name, row in ROWS.items() for ranks in row.ranks for module in row.modules]
#: without compiled ones, each of whose lives compiles anew
COVER = [
    (name, ranks, module)
    for name, ranks, module in PRODUCT
    if ranks == ROWS[name].ranks[0 if module == ROWS[name].modules[0] else -1] and "compile" not in ROWS[name].options
]
#: where it dies: over the cells, each death is met with each; a snapshot is taken after every second step
DEATHS = cover({"step": [3, 5, 8, 10], "phase": ["forward", "backward", "validation", "after_step"]}, seed=3)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "death" in metafunc.fixturenames:
        cells = PRODUCT if metafunc.config.getoption("--laws") == "all" else COVER
        metafunc.parametrize(
            ("row", "ranks", "module", "death"),
            [(*cell, DEATHS[number % len(DEATHS)]) for number, cell in enumerate(cells)],
            ids=["-".join(map(str, filter(None, cell))) for cell in cells],
        )


def test_every_strategy_resumes(
    row: str, ranks: int, module: str, death: dict[str, object], tmp_path: Path, undisturbed: Callable[[Setting], Path]
) -> None:
    start = ROWS[row].start
    setting, expected = ROWS[row].settings(ranks, module)
    plan = FaultPlan(tmp_path / "plan").add("kill", rank=ranks - 1, **death)
    codes = start(setting, tmp_path, plan)
    assert -9 in codes if start is live else codes == [1]
    assert not any(start(setting, tmp_path, plan))
    plan.assert_all_fired()
    assert_alike(tmp_path, undisturbed(expected))


class Thawing(Tangled):
    """A layer is frozen in the first epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.middle.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.middle.requires_grad_(self.trainer.progress.epoch > 0)


class Idle(Tangled):
    """Some of it takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2)


class Freezing(Tangled):
    """A layer is frozen in the second epoch."""

    def on_train_epoch_start(self) -> None:
        self.middle.requires_grad_(self.trainer.progress.epoch == 0)


class Growing(Tangled):
    """A layer comes up in the second epoch."""

    def on_train_epoch_start(self) -> None:
        if self.trainer.progress.epoch == 1:
            self.more = nn.Linear(6, 3)
            self.optimizers().add_param_group({"params": self.more.parameters()})

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (self.more(x) if hasattr(self, "more") else 0.0)


#: module -> why its gradients would stay on each rank, or be missing
REFUSED: dict[type[Tangled], str] = {
    Thawing: r"middle\.\w+ was frozen when strategy ddp was set up.* lr=0",
    Idle: r"spare\.weight, spare\.bias took no part in the loss .*find_unused_parameters",
    Growing: r"more\.weight was created in training, after the strategy was set up.* lr=0",
    Freezing: r"middle\.weight, middle\.bias took no part .* lr=0",
}


def _refused() -> None:
    for module, words in REFUSED.items():
        with pytest.raises(UserError, match=words):
            Setting(ranks=2, module=module, options={"snapshots": None}).train("never")


@pytest.mark.parametrize("strategy", ["sharded", {"lanes": 2}], ids=str)
def test_a_late_layer_without_synced_gradients_is_refused(strategy: Any) -> None:
    assert run_ranks(_refuse_growing, strategy, processes=2) == [0, 0]


def _refuse_growing(strategy: Any) -> None:
    options = strategy if isinstance(strategy, dict) else {"strategy": strategy}
    with pytest.raises(UserError, match=REFUSED[Growing]):
        Setting(ranks=2, module=Growing, options={"snapshots": None, **options}).train("never")


def test_gradients_that_would_not_be_synced_are_refused() -> None:
    assert run_ranks(_refused, processes=2) == [0, 0]
