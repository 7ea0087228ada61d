"""What is refused before anything is written, each with a message that says the way out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.refused import (
    Bad,
    ByHand,
    Counting,
    Curved,
    Eager,
    Empty,
    Endless,
    Forever,
    Forgets,
    Idle,
    Lazy,
    Module,
    Numbers,
    Odd,
    OnlyBatch,
    Own,
    Ported,
    Raising,
    Rows,
    Scaling,
    Secretive,
    Sized,
    Stepping,
    Torn,
    Unseeded,
    Validated,
    configured,
    cut_off,
    fit,
    made_anew,
    sometimes,
    unequal,
    unlogged,
)
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter import IterableWrapper

from midstride.engine import CombinedLoader, TrainingModule
from midstride.engine.errors import (
    EngineError,
    JobError,
    LossNotFinite,
    NoLoss,
    NotExact,
    StrategyUnavailable,
    UnsupportedState,
    UserCodeError,
    UserError,
)


def shares(limit: float, *loaders: Any) -> dict[str, Any]:
    return {"data": Validated(loaders[0] if len(loaders) == 1 else [*loaders]), "limit_val_batches": limit}


def loader(samples: int = 8, batch_size: int = 2, **options: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(samples), batch_size, **options)


def scheduled(make: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a module whose configure_optimizers returns a dict, of which `make` makes the scheduler."""
    return {"module": configured(lambda m, o: {"optimizer": o, "lr_scheduler": make(o)})}


def optimized(make: Callable[[Any, Any], Any]) -> dict[str, Any]:
    return {"module": configured(make)}


OUT_OF_RANGE = ["IndexError", "sampler gave [9]", "8 samples", "batch 0 of epoch 0"]
NO_BATCH = "the validate loader", "limit_val_batches=0.5 of 1 batch"
CASES: dict[str, tuple[dict[str, Any], type[EngineError], list[str]]] = {
    # data
    "no samples": ({"data": loader(0)}, UserError, ["Numbers", "length 0"]),
    "a batch too large": (
        {"data": loader(3, 4, drop_last=True)},
        UserError,
        ["batch_size 4", "3 samples", "drop_last=F"],
    ),
    "a sampler that forgets": ({"data": loader(sampler=Forgets())}, NotExact, ["Forgets", "running gen", "__iter__"]),
    "a sampler without end": ({"data": loader(sampler=Forever())}, UserError, ["Forever", "max_steps"]),
    "an index out of range": ({"data": DataLoader(Rows(), 2, sampler=[0, 9, 1, 2])}, UserCodeError, OUT_OF_RANGE),
    "an index out of range, in a worker": (
        {"data": DataLoader(Rows(), 2, sampler=[0, 9, 1, 2], num_workers=2)},
        UserCodeError,
        [*OUT_OF_RANGE, "worker 0", "train loader", "rank 0"],
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
    "an unwritable state": ({"data": DataLoader(Secretive(), 2)}, UnsupportedState, ["Secretive", "Numbers"]),
    "a data pipe": ({"data": DataLoader(IterableWrapper([1.0]), 2)}, NotExact, ["data pipe", "IterableDataset"]),
    "something else in a nest": ({"data": {"a": loader(), "b": [3]}}, UserError, ["['b'][0]", "int", "DataLoader"]),
    "one of two without a batch": (
        {"data": [loader(), loader(3, 4, drop_last=True)]},
        UserError,
        ["no batch", "batch_size 4"],
    ),
    "no loader": ({"data": 1}, UserError, ["train_dataloader"]),
    "a data set for a loader": ({"data": Numbers()}, UserError, ["a Numbers, a data set", "DataLoader"]),
    "a loader without a batch": ({"data": Own(Numbers(), 2)}, UserError, ["Own", "no batch"]),
    "a reader that raises": ({"data": DataLoader(Bad(), 2)}, UserCodeError, ["IndexError", "no image", "Bad"]),
    "a collate that raises": (
        {"data": loader(collate_fn=unequal)},
        UserCodeError,
        [
            "ValueError: 2 shapes differ",
            "unequal, collating samples [0, 1]",
            "batch 0 of epoch 0",
            "train loader",
            "rank 0",
        ],
    ),
    # no batch is left
    "no validation batch": ({"data": Validated(loader(0))}, UserError, ["validate data set Numbers", "length 0"]),
    "a share that leaves no batch to train on": (
        {"data": loader(2), "limit_train_batches": 0.5},
        UserError,
        ["training loader", "limit_train_batches=0.5 of 1 batch leaves none (0.5, rounded down)", "number of batches"],
    ),
    "a share that leaves no batch of two loaders": (
        {"data": CombinedLoader([loader(4)] * 2, "min_size"), "limit_train_batches": 0.4},
        UserError,
        ["batch to train on", "limit_train_batches=0.4 of 2 batches leaves none (0.8, rounded down)"],
    ),
    "a share that leaves no batch to validate on": (
        shares(0.5, loader(2)),
        UserError,
        [*NO_BATCH, "leaves none (0.5, rounded down)", "or 1.0 for all"],
    ),
    "a share that leaves no batch of one of two": (
        shares(0.5, loader(4), loader(2)),
        UserError,
        ["validate loader 1", "limit_val_batches=0.5 of 1 batch"],
    ),
    "no batch side by side": (shares(0.5, CombinedLoader([loader(2)] * 2, "max_size")), UserError, [*NO_BATCH]),
    "no batch of an iterable": (shares(0.5, DataLoader(Sized(2), 2)), UserError, [*NO_BATCH]),
    # options
    "an unknown option": ({"max_epoch": 3}, JobError, ["max_epoch", "max_epochs"]),
    "two bad options": ({"max_epochs": 0, "precision": "8"}, JobError, ["2 faults", "max_epochs", "precision", "'8'"]),
    "an unknown strategy": ({"strategy": "dpp"}, StrategyUnavailable, ["dpp", "ddp", "single"]),
    "two rhythms": (
        {"snapshots": {"every_steps": 1, "every_seconds": 2.0}},
        JobError,
        ["every_steps and every_seconds"],
    ),
    # modules
    "methods that nobody calls": (
        {"module": Ported(), "callbacks": [Eager()]},
        JobError,
        [
            "Ported.training_epoch_end would never be called: write on_train_epoch_end",
            "Ported.configure_sharded_model",
            "Ported.on_training_epoch_end would never be called: write on_train_epoch_end;",
            "Eager.on_epoch_end would never be called: write on_train_epoch_end and",
        ],
    ),
    "state of an unknown type": ({"module": Odd()}, UnsupportedState, ["user/tokenizer/words", "Numbers"]),
    "a class for a module": ({"module": Module}, UserError, ["the class Module", "Module(...)"]),
    "a module that does not train": ({"module": nn.Linear(2, 1)}, UserError, ["a Linear", "TrainingModule"]),
    "lazy layers, in shards": ({"module": Lazy(), "strategy": "sharded"}, JobError, ["of Lazy", "no shape yet"]),
    "a layer of setup": ({"module": Scaling(), "lanes": 2}, JobError, ["module's rows", "max_norm"]),
    "lazy layers": ({"module": Lazy()}, JobError, ["layer.weight, layer.bias of Lazy", "no shape yet", "torch.zeros"]),
    "a step without batch_idx": (
        {"module": OnlyBatch()},
        UserCodeError,
        ["takes 2 positional arguments but 3", "raised in OnlyBatch.training_step (called with batch, batch_idx)"],
    ),
    # values that are logged, and losses
    "no number": ({"module": Module(unlogged("x", None))}, UserError, ["'x'", "NoneType"]),
    "a vector": ({"module": Module(unlogged("x", torch.ones(3)))}, UserError, ["'x'", "(3,)", "mean()"]),
    "a value for nothing": (
        {"module": Module(unlogged("x", 1.0, on_step=False))},
        UserError,
        ["'x', on_step=False", "dropped", "on_epoch=True"],
    ),
    "a loss made anew": ({"module": Module(made_anew)}, UserError, ["none of the 2 parameters of SGD a gradient"]),
    "a loss cut off": ({"module": Module(cut_off)}, UserError, ["without a gradient", "detach()", "Module.training_s"]),
    "an infinite loss by hand": ({"module": ByHand()}, LossNotFinite, ["inf", "step 1"]),
    # optimizers and schedulers
    "no optimizer": ({"module": TrainingModule()}, UserError, ["configure_optimizers"]),
    "no optimizer returned": (
        optimized(lambda m, o: None),
        UserError,
        ["returned None; return an optimizer", "automatic_optimization = False and return None"],
    ),
    "the class of one": (optimized(lambda m, o: type(o)), UserError, ["returned the class SGD; return an optimizer"]),
    "no optimizer in a list": (optimized(lambda m, o: []), UserError, ["returned []; return an"]),
    "an optimizer for a scheduler": (
        optimized(lambda m, o: ([o], [o])),
        UserError,
        ["lr_scheduler is {'scheduler': SGD}", "optimizers come first: [optimizers], [schedulers]"],
    ),
    "no lists": (
        optimized(lambda m, o: (o, StepLR(o, 1))),
        UserError,
        ["returned (SGD, StepLR)", "([optimizers], [schedulers])"],
    ),
    "a mistyped key": (
        optimized(lambda m, o: {"optimizer": o, "lr_schedulers": StepLR(o, 1)}),
        UserError,
        ["'lr_schedulers'", "lr_scheduler, monitor, optimizer"],
    ),
    "no scheduler in it": (scheduled(lambda o: {"interval": "step"}), UserError, ["{'interval': str}", "a scheduler"]),
    "a scheduler that is never due": (
        scheduled(lambda o: {"scheduler": StepLR(o, 1), "frequency": 0}),
        UserError,
        ["frequency 0", "from 1"],
    ),
    "a plateau of nothing": (
        optimized(lambda m, o: ([o], [ReduceLROnPlateau(o)])),
        UserError,
        ["ReduceLROnPlateau without a monitored value", '"monitor": "val/loss"'],
    ),
    "a scheduler of another optimizer": (
        optimized(lambda m, o: ([o], [StepLR(torch.optim.SGD(m.parameters(), lr=1.0), 1)])),
        UserError,
        ["StepLR of an optimizer that it did not return"],
    ),
    "another module's parameters": (
        optimized(lambda m, o: torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)),
        UserError,
        ["none of the 2 parameters of SGD a gradient", "nothing is trained"],
    ),
    "an optimizer that raises": (
        optimized(lambda m, o: Raising(m.parameters())),
        UserCodeError,
        ["ZeroDivisionError", "raised in Raising.step"],
    ),
    "two optimizers, and a step that is not told which": (
        optimized(lambda m, o: [o, torch.optim.Adam(m.parameters())]),
        JobError,
        ["returned 2 optimizers", "Configured.training_step takes no optimizer_idx", "automatic_optimization = False"],
    ),
    "a schedule that is over": (
        {
            **scheduled(lambda o: {"scheduler": OneCycleLR(o, 0.1, total_steps=2), "interval": "step"}),
            "snapshots": None,
        },
        UserCodeError,
        ["Tried to step 3 times", "raised in OneCycleLR.step"],
    ),
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
    "a closure never called": (
        {"module": Idle()},
        UserError,
        ["Idle.optimizer_step never called its closure", "LBFGS", "batch 0", "optimizer.step(optimizer_closure)"],
    ),
    "a step of its own past the scaler": (
        {"module": Stepping(), "precision": "16"},
        JobError,
        ["precision 16 with Stepping.optimizer_step", "gradient scaler", "bf16"],
    ),
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
