"""What a step is made of: parts of a batch, batches of several processes, float16 with its scale."""

import logging
import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from laws.horovod_world import run_horovod_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from midstride.engine import Trainer, TrainingModule
from midstride.engine.errors import JobError
from midstride.engine.strategies.gradient_buckets import GradientBuckets
from midstride.engine.strategies.torch_collective import TorchCollective, anywhere, start_sum
from midstride.engine.testing import run_ranks
from midstride.engine.world import World


class Sums(TrainingModule):
    """Notes what reaches `*_step_end`, and logs what only the whole batch can tell."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.register_buffer("seen", torch.zeros(1))
        self.mean = MeanMetric()
        self._ends: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen = self.seen + len(batch[0])
        self.mean.update(batch[0][:, 0])
        self.log("mean", self.mean, on_epoch=True, on_step=False)
        self.log("first", batch[0][:, 0].mean())
        return self.layer(batch[0]).sum(1)

    def training_step_end(self, outputs: Any) -> Tensor:
        self._ends.append(tuple(outputs.shape))
        return outputs.square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return batch[0]

    test_step = validation_step

    def validation_step_end(self, outputs: Any) -> None:
        self.log("val/samples", float(len(outputs)), reduce_fx="sum")

    def test_step_end(self, outputs: Any) -> None:
        self.log("test/samples", float(len(outputs)), reduce_fx="sum")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.arange(20.0).view(10, 2)), 5)

    test_dataloader = predict_dataloader = val_dataloader = train_dataloader


def test_dp_gives_step_end_whole_batches_and_keeps_first_buffers(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "midstride")
    module = Sums()
    trainer = Trainer(strategy="dp", devices=2, max_epochs=1)
    trainer.fit(module)
    assert module._ends == [(5,), (5,)]
    assert module.seen.item() == 3 + 3  # of 3 and 2 samples, twice
    assert trainer.callback_metrics["mean"] == 9.0  # over all samples, whichever replica saw them
    assert trainer.callback_metrics["first"] == pytest.approx((10 + 12 + 14 + 16 + 18) / 5)  # weighted by samples
    assert trainer.callback_metrics["val/samples"] == 10
    assert trainer.test(module)["test/samples"] == 10
    assert len(torch.cat(trainer.predict(PredictsTwice(module)))) == 10
    assert "dp, 1 process on the CPU" in caplog.text
    assert "each batch in 2 parts; batches of 5 make 5 samples a step" in caplog.text


class PredictsTwice(Sums):
    def __init__(self, other: Sums) -> None:
        super().__init__()
        self.layer = other.layer

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return 2 * batch[0]


def ends(folder: str, strategy: str, launcher: str = "") -> None:
    """Fit in a rank and note what reached `training_step_end`, and what was said."""
    rank = os.environ["RANK"]
    if launcher == "mpirun":
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "MIDSTRIDE_MEETING"):
            value = os.environ.pop(name)
            if name in ("RANK", "WORLD_SIZE"):
                key = name.removeprefix("WORLD_")
                os.environ[f"OMPI_COMM_WORLD_{key}"] = os.environ[f"OMPI_COMM_WORLD_LOCAL_{key}"] = value
    logging.basicConfig(filename=f"{folder}/{rank}.log", level=logging.INFO)
    module = Sums()
    trainer = Trainer(strategy=strategy, **({"devices": 2} if strategy == "ddp2" else {}), max_epochs=1)
    trainer.fit(module)
    Path(folder, f"{rank}.ends").write_text(repr(module._ends))


@pytest.mark.parametrize("strategy", ["ddp", "ddp2"])
def test_a_step_takes_a_batch_from_every_process(strategy: str, tmp_path: Path) -> None:
    """With ddp2 that is a batch a node, and the node's whole batch reaches training_step_end."""
    assert run_ranks(ends, str(tmp_path), strategy, processes=2) == [0, 0]
    assert (tmp_path / "1.ends").read_text() == "[(5,)]"
    assert "batches of 5 make 10 samples a step" in (tmp_path / "0.log").read_text()
    assert "samples a step" not in (tmp_path / "1.log").read_text()


def test_ranks_that_mpirun_started_meet_without_an_address(tmp_path: Path) -> None:
    assert run_ranks(ends, str(tmp_path), "ddp", "mpirun", processes=2) == [0, 0]
    assert "2 processes" in (tmp_path / "0.log").read_text()


class ByHand(Sums):
    automatic_optimization = False


@pytest.mark.parametrize("options", [{"strategy": "dp", "devices": 2}, {"precision": 16}], ids=["dp", "16"])
def test_optimization_by_hand_is_refused_where_it_would_be_wrong(options: dict[str, Any]) -> None:
    with pytest.raises(JobError, match="automatic_optimization = False"):
        Trainer(max_epochs=1, **options).fit(ByHand())


class Overflows(Sums):
    """Its second batch is too large for float16."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0] / 100) * (1e30 if batch_idx == 1 else 1.0)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self._ends.append(self.layer.weight.flatten().tolist())

    def training_step_end(self, outputs: Any) -> Tensor:
        return outputs.float().square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def test_an_overflow_leaves_out_the_step_and_halves_the_scale() -> None:
    module = Overflows()
    trainer = Trainer(max_epochs=1, precision="16-mixed")
    before = module.layer.weight.flatten().tolist()
    trainer.fit(module)
    first, second = module._ends
    assert before != first == second
    assert trainer.context.precision.state_dict()["scale"] == 2.0**15


class Learns(Sums):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def checked_or_not(folder: str, check: bool) -> None:
    rank = os.environ["RANK"]
    trainer = Trainer(max_epochs=2, seed=5)
    module = Learns()
    if check:
        before = (trainer.strategy, trainer.world, trainer.progress, trainer.device)
        assert trainer.check(module, processes=2) == []
        assert (trainer.strategy, trainer.world, trainer.progress, trainer.device) == before
        assert trainer.strategy.world.size == 2
    trainer.fit(module)
    torch.save({"step": trainer.progress.step, **module.state_dict()}, f"{folder}/{rank}-{check}.pt")


def test_a_trainer_that_checked_fits_as_it_would_have(tmp_path: Path) -> None:
    for check in (True, False):
        assert run_ranks(checked_or_not, str(tmp_path), check, processes=2) == [0, 0]
    for rank in range(2):
        found, expected = (torch.load(tmp_path / f"{rank}-{check}.pt") for check in (True, False))
        assert found.pop("step") == expected.pop("step") == 2
        assert [*found] == [*expected]
        assert all(torch.equal(found[name], expected[name]) for name in expected)


class FallsSilent(Learns):
    """Its second rank is there and answers nothing, as behind a link that was cut."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 1 and self.trainer.world.rank == 1:
            Path(self.trainer.run_url or "", "silent").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().training_step(batch, batch_idx)


class StageFallsSilent(FallsSilent):
    def __init__(self) -> None:
        super().__init__()
        self.sequential_module, self.layer = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))), nn.Identity()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        return self.sequential_module(batch[0])

    def training_step_end(self, outputs: Tensor, batch: Any) -> Tensor:
        return outputs.square().mean()


def hears_of_it(folder: str, strategy: str) -> None:
    Path(folder, "run").mkdir(exist_ok=True)
    rank = str(World.from_environment().rank)
    try:
        trainer = Trainer(max_epochs=5, strategy=strategy, collective_timeout_s=4, snapshots={"every_steps": 1})
        trainer.fit(StageFallsSilent() if strategy == "pipeline" else FallsSilent(), run=f"{folder}/run")
    except Exception as error:
        Path(folder, f"heard-{rank}").write_text(f"{type(error).__name__}: {error}")
    finally:
        while not all(Path(folder, f"heard-{other}").exists() for other in (0, 2)):
            time.sleep(0.01)
        if rank == "0":
            os.kill(int(Path(folder, "run", "silent").read_text()), signal.SIGKILL)


@pytest.mark.parametrize(
    ("strategy", "start"), [("ddp", run_ranks), ("horovod", run_horovod_ranks), ("pipeline", run_ranks)]
)
def test_a_silent_rank_is_named_within_the_collective_timeout(
    strategy: str, start: Callable[..., list[int]], tmp_path: Path
) -> None:
    assert start(hears_of_it, str(tmp_path), strategy, processes=3) == [0, -signal.SIGKILL, 0]
    heard = {rank: (tmp_path / f"heard-{rank}").read_text() for rank in (0, 2)}
    for rank, words in heard.items():
        assert words.startswith(f"WorldError: rank {rank} lost another rank after step 1 ("), words
        seen_s = {int(rank): int(ago) for rank, ago in re.findall(r"rank (\d) was (?:last )?seen (\d+) s ago", words)}
        assert seen_s.keys() == {1, 2 - rank}, words
        assert seen_s[1] >= seen_s[2 - rank], words
        assert re.search(r"rank 1 was (last )?seen \d+ s ago, after step [01]", words), words
        assert "longer than 4 s, raise collective_timeout_s" in words
        assert "third_party" not in words, "where gloo's code stands"
    assert any("4000ms" in words or "no answer within 4 s" in words for words in heard.values())


#: characters on each rank: all short, as long as one exchange takes, one longer than that, none
LENGTHS = [(1, 2, 3), (4000, 4070, 4090), (0, 9000, 5), (4087, 4088, 4089), (0, 0, 0)]


def _gathered() -> None:
    collective = TorchCollective()
    collective.init_process_group(World.from_environment(), torch.device("cpu"))
    for lengths in LENGTHS:
        values = [{"rank": rank, "text": "x" * length} for rank, length in enumerate(lengths)]
        assert collective.gather(values[int(os.environ["RANK"])]) == values


def test_values_of_any_length_reach_every_rank() -> None:
    assert run_ranks(_gathered, processes=3) == [0, 0, 0]


def average_early_and_late(folder: str) -> None:
    """Average gradients of the same passes in them and after them, over ranks that do not all use every layer."""
    world = World.from_environment()
    TorchCollective().init_process_group(world, torch.device("cpu"))
    bits = []
    for in_backward in (True, False):
        torch.manual_seed(0)
        layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))
        buckets = GradientBuckets(start_sum(), world.size, partial(anywhere, device=torch.device("cpu")), 300)
        for step in range(3):
            for parameter in layers.parameters():
                parameter.grad = None
            x = torch.full((2, 8), 0.1 + world.rank + step)
            for number, layer in enumerate(layers):
                x = x if number == 0 or number == world.rank else layer(x).tanh()
            with buckets.backward(layers.parameters()) if in_backward else nullcontext():
                x.square().sum().backward()
            buckets.average(layers.parameters())
        gradients = [parameter.grad for parameter in layers.parameters()]
        assert [gradient is None for gradient in gradients[:3]] == [True, True, False]
        bits.append(torch.cat([gradient.reshape(-1) for gradient in gradients if gradient is not None]))
    early, late = bits
    assert early.equal(late)
    assert len({tuple(theirs) for theirs in TorchCollective().gather(early.tolist())}) == 1


def test_gradients_sent_during_and_after_backward_are_equal() -> None:
    assert run_ranks(average_early_and_late, "", processes=3) == [0, 0, 0]


class Finetuned(TrainingModule):
    """Trains its head, and what `unfreeze` frees."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 2), nn.Linear(2, 1)
        self.body.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.head(self.body(batch[0])).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([parameter for parameter in self.parameters() if parameter.requires_grad], lr=0.1)


def _fit_again_unfrozen(options: dict[str, Any]) -> None:
    module, loader = Finetuned(), DataLoader(TensorDataset(torch.randn(12, 2)), 2)
    for frees in (False, True):
        module.body.requires_grad_(frees)
        Trainer(strategy="ddp", max_epochs=1, enable_progress_bar=False, **options).fit(module, loader)
    module.body.weight.grad = None
    module.head(module.body(torch.ones(1, 2))).sum().backward()  # a loop of the user's own, after the fits
    assert module.body.weight.grad is not None


@pytest.mark.parametrize("options", [{}, {"lanes": 2}], ids=["ddp", "lanes"])
def test_parameters_frozen_in_one_fit_train_in_the_next(options: dict[str, Any]) -> None:
    assert run_ranks(_fit_again_unfrozen, options, processes=2) == [0, 0]
