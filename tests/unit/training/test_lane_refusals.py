"""What lanes cannot hold is refused by name, before anything is trained."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from midstride.engine import CombinedLoader, Trainer, TrainingModule
from midstride.engine.errors import EngineError, IdentityChanged

SAMPLES = TensorDataset(torch.randn(24, 4))


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(SAMPLES, 3, **options)


class Plain(TrainingModule):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 2), *layers)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layers(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.layers(batch[0]).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class MeasuresLate(Plain):
    def on_fit_start(self) -> None:
        self.average = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.average.update(batch[0])
        self.log("average", self.average)
        return super().training_step(batch, batch_idx)


class ByHand(Plain):
    automatic_optimization = False


class Several(Plain):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([p], 0.1) for p in self.parameters()]


class Curved(Plain):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Sparse(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 2, sparse=True)


class Scaled(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 2, max_norm=1.0)


class Synchronised(Plain):
    def __init__(self) -> None:
        super().__init__(nn.SyncBatchNorm(2))


class Counting(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen = getattr(self, "seen", 0) + 1
        return super().training_step(batch, batch_idx)


class Collecting(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.outputs.append(batch[0].sum())


class Twice(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0].requires_grad_()
        parts = [checkpoint(self.layers, x, use_reentrant=True) for _ in range(2)]
        return sum(parts).square().mean()  # type: ignore[union-attr]


class Skipping(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None


class Thawing(Plain):
    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 2).requires_grad_(False))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.layers.requires_grad_(True)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(SAMPLES)  # type: ignore[call-overload]


Refused = tuple[dict[str, Any], type[Plain], Callable[[], Any], list[str]]
REFUSED: dict[str, Refused] = {
    "six lanes": ({"lanes": 6}, Plain, loader, ["power of two from 1 to 1024", "6"]),
    "a metric made late": ({}, MeasuresLate, loader, ["average, a MeanMetric that was added after setup", "__init__"]),
    "a word": ({"lanes": "auto"}, Plain, loader, ["power of two", "'auto'"]),
    "another strategy": ({"strategy": "dp"}, Plain, loader, ["lanes with strategy dp", "single and ddp"]),
    "a strategy of one's own": (
        {"strategy": "laws.strategies:Small"},
        Plain,
        loader,
        ["your own strategy", "leave lanes out"],
    ),
    "options of ddp": (
        {"strategy": "ddp", "strategy_args": {"find_unused_parameters": True}},
        Plain,
        loader,
        ["strategy_args", "with lanes", "leave them out"],
    ),
    "16 bits": ({"precision": "16"}, Plain, loader, ["precision 16 with lanes", "bf16"]),
    "batches left out": ({"on_nan": "skip"}, Plain, loader, ["on_nan='skip'"]),
    "by hand": ({}, ByHand, loader, ["automatic_optimization=False"]),
    "two optimizers": ({}, Several, loader, ["lanes with 2 optimizers"]),
    "a closure": ({}, Curved, loader, ["lanes with LBFGS", "several times"]),
    "sparse gradients": ({}, Sparse, loader, ["table", "sparse=False"]),
    "rows that a forward pass scales": ({}, Scaled, loader, ["table", "max_norm"]),
    "synchronised statistics": ({}, Synchronised, loader, ["layers.1", "SyncBatchNorm"]),
    "a stream": ({}, Plain, lambda: DataLoader(Stream(), 3), ["Stream is iterable", "map-style"]),
    "ranks with samples of their own": ({"use_distributed_sampler": False}, Plain, loader, ["use_distributed_sampler"]),
    "a sampler that shares": (
        {},
        Plain,
        lambda: loader(sampler=DistributedSampler(SAMPLES, 2, 0)),
        ["DistributedSampler", "shuffle=True"],
    ),
    "loaders side by side": (
        {},
        Plain,
        lambda: (loader(), CombinedLoader({"a": loader(), "b": loader()})),
        ["mode min_size", "sequential"],
    ),
    "a counter": ({}, Counting, loader, ["Counting.training_step changes", "seen", "once per lane"]),
    "a list": ({}, Collecting, lambda: (loader(), loader()), ["Collecting.validation_step changes", "outputs"]),
    "gradients that come twice": ({}, Twice, loader, ["layers.0", "became ready twice", "use_reentrant=False"]),
    "a batch without a loss": ({}, Skipping, loader, ["no loss", "4 processes"]),
    "what trains later": ({}, Thawing, loader, ["layers.1", "frozen"]),
}


def fit(options: dict[str, Any], *given: Any) -> None:
    Trainer(max_epochs=1, enable_progress_bar=False, **options).fit(*given)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_what_lanes_cannot_hold_is_named(name: str) -> None:
    options, module, data, words = REFUSED[name]
    given = data()
    with pytest.raises(EngineError) as caught:
        fit({"lanes": 4, **options}, module(), *(given if isinstance(given, tuple) else (given,)))
    for word in words:
        assert word in str(caught.value)


def test_sums_that_are_computed_in_another_way_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(steps: int, **options: Any) -> None:
        trainer = Trainer(lanes=4, max_steps=steps, enable_progress_bar=False, **options)
        trainer.fit(Plain(), loader(), run=tmp_path / "run")

    train(1)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)  # as another launcher may: the run goes on with what it had
    train(2)
    assert torch.get_num_threads() == threads
    there = torch.backends.cpu.get_cpu_capability()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "other")
    with pytest.raises(IdentityChanged, match=f"cpu: the snapshot has '{there}', this run has 'other'"):
        train(3)
    train(3, accept_change=["bits"])


def test_lanes_predict_and_test_each_sample_once() -> None:
    class Telling(Plain):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test/samples", float(len(batch[0])), reduce_fx="sum", sync_dist=True)

        def predict_step(self, batch: Any, batch_idx: int) -> Any:  # type: ignore[override]
            return batch[0]

    trainer, module = Trainer(lanes=4, enable_progress_bar=False), Telling()
    assert trainer.test(module, loader()) == {"test/samples": 24.0}
    predicted = torch.cat(trainer.predict(module, loader()))
    assert sorted(predicted.tolist()) == sorted(SAMPLES.tensors[0].tolist())
