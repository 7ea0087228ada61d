"""Law of `verify_every`: a step executed twice changes no bit, and a bit that one machine flips is found and named."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from laws.lives import Setting, Tangled, assert_alike, assert_runs_alike, live
from laws.strategies import ROWS
from torch import Tensor, nn

from midstride.engine import WeightAveraging
from midstride.engine.errors import EngineError
from midstride.engine.snapshots.catalog import SnapshotCatalog
from midstride.engine.storage.store import Store
from midstride.engine.testing import run_ranks

#: name -> row and module of the laws of strategies
COVER = {"single": ("", ""), "ddp": ("", ""), "accumulation": ("", ""), "averages (EMA)": ("", "")}
#: what a Trainer can be given, beside the module
ADDED = {
    "averages (EMA)": Setting(1, callbacks=(partial(WeightAveraging, 0.9),)),
    "averages (SWA)": Setting(1, callbacks=(partial(WeightAveraging, start_step=4, every_steps=2),)),
    "compiled": Setting(1, options={"compile": True}),
    "scaled": Setting(1, options={"precision": "16", "gradient_clip_val": 0.5}),
}
PRODUCT = COVER | {
    **{row: ("", "") for row in ADDED},
    **{
        f"{row}, {module or 'plain'}": (row, module)
        for row in ("dp on 2", "ddp2", "ddp, 16 bits", "horovod", "fully_sharded", "pipeline")
        if row in ROWS
        for module in ROWS[row].modules[:2]
    },
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "row" in metafunc.fixturenames:
        everything = metafunc.config.getoption("--laws") == "all"
        metafunc.parametrize("row", PRODUCT if everything else COVER)


def setting_of(row: str) -> Setting:
    name, module = PRODUCT[row]
    if row in ADDED:
        return ADDED[row]
    if name:
        return ROWS[name].settings(ROWS[name].ranks[0], module)[0]
    layout = "accumulation" if row == "accumulation" else "plain"
    return Setting(ranks=3 if row == "ddp" else 1, layout=layout)


def test_a_step_executed_twice_changes_no_bit(row: str, tmp_path: Path, undisturbed: Callable[[Setting], Path]) -> None:
    setting = setting_of(row)
    checked = replace(setting, options={**setting.options, "verify_every": 1})
    assert live(checked, tmp_path) == [0] * setting.ranks
    assert_alike(tmp_path, undisturbed(setting))


class Wrong(nn.Linear):
    """Computes one value wrongly, once, on the rank and in the step of a `Flip`."""

    def forward(self, x: Tensor) -> Tensor:
        output, (rank, step, mark) = super().forward(x), os.environ["LAWS_FLIP"].split(" ", 2)
        if getattr(self, "at", ()) != (int(rank), int(step)) or Path(mark).exists():
            return output
        Path(mark).touch()
        flipped = output.clone()
        flipped.detach().view(torch.int32).view(-1)[output.argmax()] ^= 1 << 22
        return flipped


class Flipping(Tangled):
    def __init__(self) -> None:
        super().__init__()
        self.middle = Wrong(40, 5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.middle.at = self.global_rank, self.global_step
        return super().training_step(batch, batch_idx)


@dataclass(frozen=True)
class Flip:
    """A rank, the step before which it computes wrongly, and a file that shows that it has."""

    rank: int
    step: int
    mark: Path

    @property
    def environment(self) -> dict[str, str]:
        return {"LAWS_FLIP": f"{self.rank} {self.step} {self.mark}"}


def told(setting: Setting, folder: Path, flip: Flip | None = None) -> list[str]:
    """Train on every rank; return what each error says, by rank."""
    environment = {**os.environ, **(flip.environment if flip is not None else {})}
    run_ranks(_tell, setting, str(folder), processes=setting.ranks, environment=environment)
    return [path.read_text() for path in sorted(folder.glob("told-*"))]


def _tell(setting: Setting, folder: str) -> None:
    try:
        setting.train(f"{folder}/run")
    except EngineError as error:
        Path(folder, f"told-{os.environ['RANK']}").write_text(str(error))


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_flipped_bit_is_found(ranks: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"verify_every": 3, "snapshots": {"every_steps": 1, "keep": 2}}
    setting = Setting(ranks=ranks, module=Flipping, options=options)
    mark, wrong, right = tmp_path / "flipped", tmp_path / "wrong", tmp_path / "right"
    flip: Any = Flip(ranks - 1, 8, mark)
    for folder in (wrong, right):
        folder.mkdir()
    texts = told(setting, wrong, flip)
    assert mark.exists()
    assert len(texts) == ranks
    for text in texts:
        assert "step 9, executed twice from the same state, differs: the output of middle (Wrong) on rank" in text
        assert f"on rank {ranks - 1} (machine " in text
        assert "or rank" not in text
    catalog = SnapshotCatalog(Store.open(str(wrong / "run")))
    assert [one.position.step for one in catalog.snapshots()][-1] == 6
    assert 8 in {int(name[:12]) for name in catalog.set_aside_reasons()}
    for folder in (wrong, right):
        assert live(setting, folder, flip) == [0] * ranks
    assert_runs_alike(str(wrong / "run"), str(right / "run"))


class Clock(Tangled):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        return out * (1 + time.perf_counter() % 1)


def test_a_step_that_reads_a_clock_is_refused(tmp_path: Path) -> None:
    (text,) = told(Setting(module=Clock, options={"verify_every": 5}), tmp_path)
    assert "step 2, executed twice from the same state, differs: the loss on rank 0" in text
    assert "The step depends on something outside the state: a clock" in text
