"""`Trainer.replay`: a step again, with its gradients, in a script."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.limit import LIMIT_S
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from midstride.engine import Trainer, TrainingModule
from midstride.engine.errors import EngineError, LossNotFinite, ReplayEnd
from midstride.engine.runs.replay import replay_environment
from midstride.engine.runs.run_report import metric_rows
from midstride.engine.session.replay_plan import RESULT, ReplayPlan
from midstride.engine.snapshots.parent import open_run
from midstride.engine.testing.ranks import run_ranks


class Net(TrainingModule):
    def __init__(self, bad_step: int = -1) -> None:
        super().__init__()
        self.bad_step = bad_step
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.caught: list[BaseException] = []

    def on_exception(self, exception: BaseException) -> None:
        self.caught.append(exception)

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
        assert module.caught == [], "the end of a replay is no error"
    assert {str(path): path.stat().st_mtime_ns for path in Path(run).rglob("*")} == before
    replays.fit(module, loader(), run=run)  # as before


class TwoLosses(Net):
    """Takes two backward passes and steps by hand, as the networks of a GAN."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for number, optimizer in enumerate(self.optimizers()):
            loss = self.net(batch[0]).pow(2).mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.log(f"loss-{number}", loss)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.net[0], self.net[2])]


def test_each_loss_of_a_step_by_hand_is_given(tmp_path: Path) -> None:
    trainer().fit(TwoLosses(), loader(), run=tmp_path / "run")
    with trainer().replay(TwoLosses(), loader(), run=tmp_path / "run", step=7) as at:
        row = next(row for row in metric_rows(open_run(str(tmp_path / "run"))) if row["step"] == "7")
        assert at.page["losses"] == [float(row["loss-0"]), float(row["loss-1"])]


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


class Uneven(Net):
    """Differs on rank 1 where the losses of single samples are computed, and exchanges something there."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.seen = way, nn.Buffer(torch.zeros(1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        is_odd = self.trainer.global_rank == 1
        if self.way == "a buffer grows" and is_odd and self.training:
            self.seen = torch.zeros(len(self.seen) + 1)
        if self.way == "the step fails" and is_odd and not self.training:
            raise LookupError("of a sample")
        if self.way != "alike" and not self.training:
            dist.all_reduce(torch.ones(1))
        return super().training_step(batch, batch_idx)


class Collate:
    """Gives rank 1 a tensor of its own length, or batches of its own size."""

    def __init__(self, way: str) -> None:
        self.way = way

    def __call__(self, samples: list[Any]) -> list[Tensor]:
        batch = torch.stack([sample[0] for sample in samples])
        is_odd = dist.get_rank() == 1
        if self.way == "a batch is shorter" and is_odd:
            return [batch[1:]]
        return [batch, torch.ones(3)] if self.way == "a batch cannot be split" and is_odd else [batch]


def _replay_step(way: str, folder: Path) -> None:
    with replay_environment(ReplayPlan(str(folder), 2)):
        fits = Trainer(max_epochs=1, seed=3, strategy="ddp", enable_progress_bar=False, snapshots=None)
    samples = TensorDataset(torch.randn(24, 3, generator=torch.Generator().manual_seed(1)))
    with pytest.raises(ReplayEnd):
        fits.fit(Uneven(way), DataLoader(samples, batch_size=4, collate_fn=Collate(way)))


@pytest.mark.parametrize(
    "way", ["alike", "a batch is shorter", "a batch cannot be split", "the step fails", "a buffer grows"]
)
def test_ranks_agree_on_the_losses_of_samples(way: str, tmp_path: Path) -> None:
    assert run_ranks(_replay_step, way, tmp_path, processes=2, timeout_s=LIMIT_S) == [0, 0]
    page = json.loads((tmp_path / RESULT).read_text())["page"]
    assert ("largest" in page) == (way == "alike")
