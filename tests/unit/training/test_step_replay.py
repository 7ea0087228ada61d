"""`Trainer.replay`: a step again, with its gradients, in a script."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from midstride.engine import Trainer, TrainingModule
from midstride.engine.errors import EngineError, LossNotFinite
from midstride.engine.runs.run_report import metric_rows
from midstride.engine.snapshots.parent import open_run


class Net(TrainingModule):
    def __init__(self, bad_step: int = -1) -> None:
        super().__init__()
        self.bad_step = bad_step
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch[0]).pow(2).mean()
        self.log("loss", loss)
        return loss * float("nan") if self.global_step == self.bad_step else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader() -> DataLoader[Any]:
    samples = TensorDataset(torch.randn(24, 3, generator=torch.Generator().manual_seed(1)))
    return DataLoader(samples, batch_size=4, shuffle=True)


def trainer() -> Trainer:
    return Trainer(max_epochs=2, seed=3, enable_progress_bar=False, snapshots={"every_steps": 4, "keep": 9})


@pytest.fixture
def run(tmp_path: Path) -> str:
    trainer().fit(Net(), loader(), run=tmp_path / "run")
    return str(tmp_path / "run")


def test_a_step_is_given_with_its_gradients(run: str) -> None:
    before = {str(path): path.stat().st_mtime_ns for path in Path(run).rglob("*")}
    module, replays = Net(), trainer()
    with replays.replay(module, loader(), run=run, step=7) as at:
        row = next(row for row in metric_rows(open_run(run)) if row["step"] == "7")
        assert at.loss is not None
        assert float(at.loss) == float(row["loss"])
        assert (at.batch[0].shape, at.page["batch"], at.page["epoch"]) == ((4, 3), 0, 1)
        assert all(parameter.grad is not None for parameter in module.parameters())
    assert {str(path): path.stat().st_mtime_ns for path in Path(run).rglob("*")} == before
    replays.fit(module, loader(), run=run)  # as before


def test_a_loss_that_is_not_finite_ends_with_the_call(tmp_path: Path) -> None:
    with pytest.raises(LossNotFinite) as ended:
        trainer().fit(Net(bad_step=6), loader(), run=tmp_path / "run")
    last = ended.value.__notes__[-1]
    assert last == f'look into it:  with trainer.replay(module, data, run="{tmp_path}/run", step=7) as at: ...'


@pytest.mark.parametrize(
    ("step", "message"), [(13, r"step 13 of .* does not exist: the run ends with 12"), (3, "keeps no snapshot before")]
)
def test_refused(step: int, message: str, run: str) -> None:
    with pytest.raises(EngineError, match=message), trainer().replay(Net(), loader(), run=run, step=step):
        pass
