"""Bad input: each a clear error that says what, both values, where and the way out, with nothing written or lost."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from torch.utils.data.datapipes.iter import IterableWrapper
from torchmetrics import CatMetric

from midstride.engine import BestCheckpoint, Callback, Trainer, TrainingModule
from midstride.engine.errors import (
    EngineError,
    IdentityChanged,
    JobError,
    LossNotFinite,
    NoLoss,
    NotExact,
    ReadBackDiffers,
    StoreUnsafe,
    StrategyUnavailable,
    UnsupportedState,
    UserCodeError,
    UserError,
)
from midstride.engine.state.codec import differences
from midstride.engine.testing import final_state


class Numbers(Dataset[Tensor]):
    def __init__(self, samples: int = 8) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((2,), float(index))


class Endless(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        yield torch.zeros(2)


class Empty(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        return iter(())


class Lines(IterableDataset[Tensor]):
    def __init__(self, lines: int) -> None:
        self.lines = lines

    def __iter__(self) -> Any:
        return (torch.full((2,), float(line)) for line in range(self.lines))


class Torn(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        yield torch.zeros(2)
        raise OSError("no line 1")


class Secretive(Endless):
    def state_dict(self) -> dict[str, Any]:
        return {"source": Numbers()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class Module(TrainingModule):
    def __init__(self, act: Callable[[Any, int], Tensor] | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.act = act

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.act(self, batch_idx) if self.act else self.layer(batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(run: Path | None = None, *, module: TrainingModule | None = None, data: Any = None, **options: Any) -> None:
    loader = data if data is not None else DataLoader(Numbers(), 2, shuffle=True)
    options = {"max_epochs": 1, "snapshots": {"every_steps": 1}, **options}
    Trainer(**options).fit(module or Module(), loader, run=None if run is None else str(run))


class Forgets(Sampler[int]):
    """What it does next stands where nobody can read it."""

    def __init__(self) -> None:
        self.starts = itertools.count()

    def __iter__(self) -> Iterator[int]:
        start = next(self.starts)
        return iter([(start + number) % 8 for number in range(8)])


class Forever(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.cycle(range(8))


class Shrinking(Sampler[int]):
    def __init__(self) -> None:
        self.length = 9

    def __iter__(self) -> Iterator[int]:
        self.length -= 1
        return iter(range(self.length))


class Rows(Numbers):
    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(self.samples, 2)[index]


class Counting(Numbers):
    calls = 0

    def __getitem__(self, index: int) -> Tensor:
        self.calls += 1
        return super().__getitem__(index) + self.calls


class Unseeded(Numbers):
    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) + float(np.random.default_rng().random())


def broken(module: Module, batch_idx: int) -> Tensor:
    if batch_idx == 2:
        raise KeyError("colour")
    return module.layer(torch.ones(1, 2)).mean()


def infinite(module: Module, batch_idx: int) -> Tensor:
    return module.layer(torch.ones(1, 2)).mean() * (float("nan") if batch_idx == 3 else 1.0)


class Bad(Dataset[Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        raise IndexError(f"row {index} has no image")


def unequal(samples: list[Tensor]) -> Tensor:
    raise ValueError(f"{len(samples)} shapes differ")


class Odd(Module):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["tokenizer"] = {"words": Numbers()}


def unlogged(name: str, value: Any) -> Callable[[Any, int], Tensor]:
    def act(module: Module, batch_idx: int) -> Tensor:
        module.log(name, value)
        return module.layer(torch.ones(1, 2)).mean()

    return act


class Validated(Module):
    def __init__(self, validation: Any) -> None:
        super().__init__()
        self._loaders = {"train": DataLoader(Numbers(), 2), "val": validation}

    def train_dataloader(self) -> Any:
        return self._loaders["train"]

    def val_dataloader(self) -> Any:
        return self._loaders["val"]


class Own(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter([])


class ByHand(Module):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.layer(batch).mean() * float("inf"))


class Forgetful(Module):
    """Says more than it takes back."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = next(COUNT)


class Elsewhere(Module):
    """Says what another life does not."""

    life = 1

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = self.life


class Ported(Module):
    """Written for Lightning 1."""

    def training_epoch_end(self, outputs: Any) -> None: ...
    def optimizer_step(self, *arguments: Any) -> None: ...
    def on_training_epoch_end(self) -> None: ...
    def on_my_own(self) -> None: ...


class Eager(Callback):
    def on_epoch_end(self, *arguments: Any) -> None: ...


COUNT = itertools.count()


def sometimes(first: int, returned: Any = None) -> Callable[[Any, int], Any]:
    """A loss from batch `first` of each epoch on."""
    return lambda module, batch_idx: returned if batch_idx < first else module.layer(torch.ones(1, 2)).mean()


class Lazy(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LazyLinear(1)


class Curved(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


def configured(make: Callable[[Module, Any], Any]) -> Module:
    """A module whose optimizers are what `make` returns for it and an SGD over it."""

    class Configured(Module):
        def configure_optimizers(self) -> Any:
            return make(self, torch.optim.SGD(self.parameters(), lr=0.1))

    return Configured()


def made_anew(module: Module, batch_idx: int) -> Tensor:
    return torch.tensor(module.layer(torch.ones(1, 2)).mean().item(), requires_grad=True)


def cut_off(module: Module, batch_idx: int) -> Tensor:
    return module.layer(torch.ones(1, 2)).mean().detach()


CASES: dict[str, tuple[dict[str, Any], type[EngineError], list[str]]] = {
    "no samples": ({"data": DataLoader(Numbers(0), 2)}, UserError, ["Numbers", "length 0"]),
    "a batch too large": (
        {"data": DataLoader(Numbers(3), 4, drop_last=True)},
        UserError,
        ["batch_size 4", "3 samples", "drop_last=False"],
    ),
    "a sampler that forgets": (
        {"data": DataLoader(Numbers(), 2, sampler=Forgets())},
        NotExact,
        ["Forgets", "another order", "state_dict"],
    ),
    "a sampler without end": ({"data": DataLoader(Numbers(), 2, sampler=Forever())}, NotExact, ["Forever", "end"]),
    "a sampler that gives less": (
        {"data": DataLoader(Numbers(), 2, sampler=Shrinking())},
        UserError,
        ["Shrinking", "8 items", "7 in the next"],
    ),
    "an index out of range": (
        {"data": DataLoader(Rows(), 2, sampler=[0, 9, 1, 2])},
        UserCodeError,
        ["IndexError", "sampler gave [9]", "8 samples", "batch 0 of epoch 0"],
    ),
    "an index out of range, in a worker": (
        {"data": DataLoader(Rows(), 2, sampler=[0, 9, 1, 2], num_workers=2)},
        UserCodeError,
        ["IndexError", "worker 0", "sampler gave [9]", "8 samples", "batch 0 of epoch 0", "train loader", "rank 0"],
    ),
    "a data set that counts": ({"data": DataLoader(Counting(), 2)}, NotExact, ["Counting[0]", "reseed", "batch"]),
    "a data set beyond reach": ({"data": DataLoader(Unseeded(), 2)}, NotExact, ["Unseeded[0]", "reseed(seed)"]),
    "a share of an iterable": (
        {"data": DataLoader(Endless(), 2), "limit_train_batches": 0.5},
        UserError,
        ["Endless", "0.5", "number of batches"],
    ),
    "an empty iterable": ({"data": DataLoader(Empty(), 2)}, UserError, ["Empty", "no batch"]),
    "an iterable that raises": ({"data": DataLoader(Torn(), 2)}, UserCodeError, ["OSError", "no line 1", "Torn"]),
    "state of an iterable that cannot be written": (
        {"data": DataLoader(Secretive(), 2)},
        UnsupportedState,
        ["Secretive", "Numbers"],
    ),
    "a data pipe": ({"data": DataLoader(IterableWrapper([1.0]), 2)}, NotExact, ["data pipe", "IterableDataset"]),
    "a nest with something else in it": (
        {"data": {"a": DataLoader(Numbers(), 2), "b": [3]}},
        UserError,
        ["['b'][0]", "int", "DataLoader"],
    ),
    "two loaders, one without a batch": (
        {"data": [DataLoader(Numbers(), 2), DataLoader(Numbers(3), 4, drop_last=True)]},
        UserError,
        ["no batch", "batch_size 4"],
    ),
    "no loader": ({"data": [1]}, UserError, ["train_dataloader"]),
    "no optimizer": ({"module": TrainingModule()}, UserCodeError, ["configure_optimizers"]),
    "an unknown option": ({"max_epoch": 3}, JobError, ["max_epoch", "max_epochs"]),
    "two bad options": ({"max_epochs": 0, "precision": "8"}, JobError, ["2 faults", "max_epochs", "precision", "'8'"]),
    "an unknown strategy": ({"strategy": "dpp"}, StrategyUnavailable, ["dpp", "ddp", "single"]),
    "methods that nobody calls": (
        {"module": Ported(), "callbacks": [Eager()]},
        JobError,
        [
            "Ported.training_epoch_end would never be called: write on_train_epoch_end",
            "Ported.optimizer_step",
            "Ported.on_training_epoch_end would never be called: write on_train_epoch_end;",
            "Eager.on_epoch_end would never be called: write on_train_epoch_end and",
        ],
    ),
    "two rhythms": (
        {"snapshots": {"every_steps": 1, "every_seconds": 2.0}},
        JobError,
        ["every_steps and every_seconds"],
    ),
    "state of an unknown type": (
        {"module": Odd()},
        UnsupportedState,
        ["user/tokenizer/words", "Numbers"],
    ),
    "a column's name": ({"module": Module(unlogged("step", 1.0))}, UserError, ["'step'", "column"]),
    "no number": ({"module": Module(unlogged("x", None))}, UserError, ["'x'", "NoneType"]),
    "a vector": ({"module": Module(unlogged("x", torch.ones(3)))}, UserError, ["'x'", "(3,)", "mean()"]),
    "no optimizer returned": ({"module": configured(lambda m, o: None)}, UserError, ["returned None; an optimizer"]),
    "an optimizer for a scheduler": (
        {"module": configured(lambda m, o: ([o], [o]))},
        UserError,
        ["lr_scheduler is {'scheduler': SGD}", "torch.optim.lr_scheduler"],
    ),
    "no lists": (
        {"module": configured(lambda m, o: (o, StepLR(o, 1)))},
        UserError,
        ["returned (SGD, StepLR)", "([optimizers], [schedulers])"],
    ),
    "a mistyped key": (
        {"module": configured(lambda m, o: {"optimizer": o, "lr_schedulers": StepLR(o, 1)})},
        UserError,
        ["'lr_schedulers'", "lr_scheduler, monitor, optimizer"],
    ),
    "no scheduler in it": (
        {"module": configured(lambda m, o: {"optimizer": o, "lr_scheduler": {"interval": "step"}})},
        UserError,
        ["{'interval': str}", "a scheduler"],
    ),
    "a scheduler that is never due": (
        {
            "module": configured(
                lambda m, o: {"optimizer": o, "lr_scheduler": {"scheduler": StepLR(o, 1), "frequency": 0}}
            )
        },
        UserError,
        ["frequency 0", "from 1"],
    ),
    "a plateau of nothing": (
        {"module": configured(lambda m, o: ([o], [ReduceLROnPlateau(o)]))},
        UserError,
        ["ReduceLROnPlateau that watches nothing", '"monitor": "val/loss"'],
    ),
    "a scheduler of another optimizer": (
        {"module": configured(lambda m, o: ([o], [StepLR(torch.optim.SGD(m.parameters(), lr=1.0), 1)]))},
        UserError,
        ["StepLR of an optimizer that it did not return"],
    ),
    "another module's parameters": (
        {"module": configured(lambda m, o: torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1))},
        UserError,
        ["none of the 2 parameters of SGD a gradient", "nothing is trained"],
    ),
    "a loss made anew": ({"module": Module(made_anew)}, UserError, ["none of the 2 parameters of SGD a gradient"]),
    "a class for a module": ({"module": Module}, UserError, ["the class Module", "Module(...)"]),
    "a module that does not train": ({"module": nn.Linear(2, 1)}, UserError, ["a Linear", "TrainingModule"]),
    "a data set for a loader": ({"data": Numbers()}, UserError, ["a Numbers, a data set", "DataLoader"]),
    "lazy layers": ({"module": Lazy()}, JobError, ["layer.weight, layer.bias of Lazy", "no shape yet", "torch.zeros"]),
    "a closure over a window": (
        {"module": Curved(), "accumulate_grad_batches": 2, "precision": "16", "on_nan": "skip"},
        JobError,
        ["accumulate_grad_batches=2 with LBFGS", "precision 16 with LBFGS", "on_nan: skip with LBFGS"],
    ),
    "a closure without a loss": (
        {"module": Curved(sometimes(1))},
        NoLoss,
        ["LBFGS needs a loss for every batch, and batch 0 has none"],
    ),
    "a loss cut off": ({"module": Module(cut_off)}, UserError, ["without a gradient", "detach()", "Module.training_s"]),
    "a loader of its own": ({"data": Own(Numbers(), 2)}, NotExact, ["Own", "__iter__"]),
    "a collate that raises": (
        {"data": DataLoader(Numbers(), 2, collate_fn=unequal)},
        UserCodeError,
        [
            "ValueError: 2 shapes differ",
            "unequal, collating samples [0, 1]",
            "batch 0 of epoch 0",
            "train loader",
            "rank 0",
        ],
    ),
    "a validation without a batch": (
        {"data": Validated(DataLoader(Numbers(0), 2))},
        UserError,
        ["validate data set Numbers", "length 0"],
    ),
    "an infinite loss by hand": ({"module": ByHand()}, LossNotFinite, ["inf", "step 1"]),
    "a reader that raises": ({"data": DataLoader(Bad(), 2)}, UserCodeError, ["IndexError", "no image", "Bad"]),
}


@pytest.mark.parametrize("case", CASES)
def test_is_refused_before_anything_is_written(case: str, tmp_path: Path) -> None:
    arguments, error, words = CASES[case]
    with pytest.raises(error) as caught:
        fit(tmp_path / "run", **arguments)
    assert caught.value.exit_code == 2
    for word in words:
        assert word in str(caught.value)
    assert not list(tmp_path.glob("run/snapshots/*"))
    assert not list(tmp_path.glob("run/last/*"))


def test_an_exception_of_the_user_starts_with_their_traceback(tmp_path: Path) -> None:
    with pytest.raises(UserCodeError) as caught:
        fit(tmp_path / "run", module=Module(broken))
    text = str(caught.value)
    assert text.startswith("Traceback")
    assert "KeyError: 'colour'" in text
    assert "in broken" in text
    assert "Module.training_step" in text
    assert "midstride/engine" not in text
    assert "loops.py" not in text


def test_a_loss_that_is_not_finite_keeps_earlier_snapshots(tmp_path: Path) -> None:
    with pytest.raises(LossNotFinite, match="nan at epoch 0, batch 3, step 4 on rank 0") as caught:
        fit(tmp_path / "run", module=Module(infinite))
    assert caught.value.exit_code == 2
    assert sorted(p.name[:12] for p in (tmp_path / "run" / "snapshots").iterdir()) == [f"{s:012d}" for s in (1, 2, 3)]


def test_another_identity_is_refused_with_both_values_and_accepted_by_name(tmp_path: Path) -> None:
    fit(tmp_path, seed=1)
    before = sorted(tmp_path.rglob("*"))
    larger = DataLoader(Numbers(), 4, shuffle=True)
    with pytest.raises(IdentityChanged) as caught:
        fit(tmp_path, seed=2, data=larger)
    for words in ("seed: the snapshot has 1, this run has 2", "global_batch_size: the snapshot has 2, this run has 4"):
        assert words in str(caught.value)
    accept = "--accept-change global_batch_size --accept-change seed"
    assert accept in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before
    fit(tmp_path, seed=2, data=larger, accept_change=["seed", "global_batch_size"], max_epochs=2)


#: the data of a run's first life, those of the next, and what is said to them
CHANGED: dict[str, tuple[Callable[[], Any], Callable[[], Any], type[EngineError], list[str]]] = {
    "a data set that shrank": (
        lambda: DataLoader(Numbers(8), 2, shuffle=True),
        lambda: DataLoader(Numbers(6), 2, shuffle=True),
        IdentityChanged,
        ["samples: the snapshot has 8, this run has 6", "--accept-change samples"],
    ),
    "a sampler that gives others": (
        lambda: DataLoader(Numbers(), 2, sampler=[3, 1, 4, 1, 5, 2, 6, 5]),
        lambda: DataLoader(Numbers(), 2, sampler=[3, 1, 4, 1, 5, 2, 6, 0]),
        IdentityChanged,
        ["sampler: the snapshot has", "this run has"],
    ),
    "an iterable that ends early": (
        lambda: DataLoader(Lines(8), 2),
        lambda: DataLoader(Lines(4), 2),
        NotExact,
        ["training loader over Lines", "ended after 2 batches, and the run had read 3"],
    ),
    "an iterable that ends where the run stands": (
        lambda: DataLoader(Lines(8), 2),
        lambda: DataLoader(Lines(6), 2),
        UserError,
        ["training loader over Lines", "no batch after batch 3, which the run has trained on"],
    ),
}


@pytest.mark.parametrize("case", CHANGED)
def test_data_that_changed_between_two_lives_are_refused_and_nothing_is_lost(case: str, tmp_path: Path) -> None:
    given, changed, error, words = CHANGED[case]
    fit(tmp_path / "whole", data=given())
    fit(tmp_path / "run", data=given(), max_epochs=None, max_steps=3)
    before = sorted((tmp_path / "run" / "snapshots").iterdir())
    with pytest.raises(error) as caught:
        fit(tmp_path / "run", data=changed())
    assert caught.value.exit_code == 2
    for word in words:
        assert word in str(caught.value)
    assert sorted((tmp_path / "run" / "snapshots").iterdir()) == before
    fit(tmp_path / "run", data=given())
    assert not differences(final_state(str(tmp_path / "whole")), final_state(str(tmp_path / "run")))


def test_a_store_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("not a folder")
    with pytest.raises(StoreUnsafe, match="taken") as caught:
        fit(tmp_path / "taken" / "run")
    assert caught.value.exit_code == 2


def test_state_that_is_not_taken_back_is_named(tmp_path: Path) -> None:
    fit(tmp_path, module=Elsewhere())
    Elsewhere.life = 2
    with pytest.raises(ReadBackDiffers, match=r"user did not take back the state it gave: .*seen"):
        fit(tmp_path, module=Elsewhere(), max_epochs=2)


def test_state_that_is_not_taken_back_is_named_before_the_first_step(tmp_path: Path) -> None:
    words = r"what on_save_checkpoint keeps, before the first step, did not take back the state given: .*seen"
    with pytest.raises(NotExact, match=words):
        fit(tmp_path, module=Forgetful())


def test_an_unlogged_monitor_lists_what_was_logged(tmp_path: Path) -> None:
    class Logs(Module):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val/loss", 1.0)

        def val_dataloader(self) -> DataLoader[Any]:
            return DataLoader(Numbers(), 2)

        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(Numbers(), 2)

    with pytest.raises(UserError, match=r"'val/acc', which was not logged; logged so far: val/loss"):
        Trainer(max_epochs=1, callbacks=[BestCheckpoint("val/acc")]).fit(Logs(), run=str(tmp_path / "run"))


#: batches of an epoch, those skipped at its beginning, what is returned for them, options -> words of a refusal
SKIPPED: dict[str, tuple[int, int, Any, dict[str, Any], str]] = {
    "a few": (12, 11, None, {}, ""),
    "as many as tell": (101, 100, None, {}, "any of the 100 batches of epoch 0"),
    "nearly as many": (101, 99, None, {}, ""),
    "all of them": (3, 3, None, {}, "Module.training_step returned no loss for any of the 3 batches"),
    "a loss under another name": (3, 3, {"Loss": 1.0}, {}, "any of the 3 batches"),
    "all until max_steps": (9, 9, None, {"max_steps": 2}, "any of the 2 batches"),
}


@pytest.mark.parametrize("case", SKIPPED)
def test_skipped_batches_are_named_once_and_refused_where_an_epoch_begins_with_nothing_else(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    batches, first, returned, options, words = SKIPPED[case]
    data = DataLoader(Numbers(batches), 1)
    with pytest.raises(NoLoss, match=words) if words else nullcontext():
        fit(module=Module(sometimes(first, returned)), data=data, **{"max_epochs": 2, **options})
    told = [r.getMessage() for r in caplog.records if "is skipped" in r.getMessage()]
    assert len(told) == 1
    assert "Module.training_step returned" in told[0]
    assert "at epoch 0, batch 0" in told[0]


def test_a_fit_that_had_no_loss_is_not_finished_by_starting_it_again(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(NoLoss, match="any of the 4 batches"):
            fit(tmp_path / "run", module=Module(sometimes(4)))
    assert not (tmp_path / "run" / "last").exists()


class Validates(Module):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", 1.0)


class Holds(Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen = CatMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        predicted = self.layer(batch)
        self.seen.update(predicted)
        return predicted.mean()


#: what is given -> what is said of it, once
SAID: dict[str, tuple[dict[str, Any], str]] = {
    "a validation without data": ({"module": Validates()}, "Validates.validation_step is never called"),
    "a monitor without a validation": (
        {"callbacks": [BestCheckpoint("val/loss")]},
        "BestCheckpoint looks at val/loss after a validation, and there is none",
    ),
    "validation data without a step": (
        {"data": Validated(DataLoader(Numbers(), 2))},
        "there are validation loaders, and Module has no validation_step",
    ),
    "parameters in no optimizer": (
        {"module": configured(lambda m, o: torch.optim.SGD([m.layer.weight], lr=0.1))},
        "1 of 2 parameters of Configured that collect gradients are in no optimizer: they do not change: layer.bias",
    ),
    "parameters of another module": (
        {"module": configured(lambda m, o: torch.optim.SGD([m.layer.weight, m.layer.bias, torch.ones(1)], lr=0.1))},
        "1 of 3 parameters that the optimizers train are not the module's",
    ),
    "a metric that holds graphs": ({"module": Holds()}, "the metric seen was given predictions that hang on a graph"),
}


@pytest.mark.parametrize("case", SAID)
def test_what_takes_no_part_is_named(case: str, caplog: pytest.LogCaptureFixture) -> None:
    arguments, words = SAID[case]
    fit(**arguments)
    assert sum(words in message for message in caplog.messages) == 1, caplog.messages


def test_an_evaluation_without_a_step_is_refused() -> None:
    with pytest.raises(UserError, match="Module has no test_step: nothing would be evaluated"):
        Trainer(enable_progress_bar=False).test(Module(), DataLoader(Numbers(), 2))


def test_another_kind_of_optimizer_is_refused_with_both(tmp_path: Path) -> None:
    fit(tmp_path)
    with pytest.raises(IdentityChanged, match=r"the state of SGD, and configure_optimizers returned SGD, StepLR"):
        fit(tmp_path, module=stepped(), max_epochs=2)


def stepped() -> Module:
    class Stepped(Module):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [StepLR(optimizer, 1)]

    Stepped.__qualname__, Stepped.__module__ = Module.__qualname__, Module.__module__
    return Stepped()


def test_a_place_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match='resume=\'always\': "auto", "never" or the step'):
        Trainer(max_epochs=1).fit(Module(), DataLoader(Numbers(), 2), run=tmp_path, resume="always")  # type: ignore[arg-type]
