"""What is said when a fit fails, or when something of it takes no part."""

import pickle
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from support.refused import (
    Elsewhere,
    Forgetful,
    Lines,
    Module,
    Numbers,
    Validated,
    broken,
    configured,
    fit,
    infinite,
    sometimes,
)
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader
from torchmetrics import CatMetric

from midstride.engine import BestCheckpoint, Trainer
from midstride.engine.errors import (
    EngineError,
    IdentityChanged,
    JobError,
    LossNotFinite,
    NoLoss,
    NotExact,
    ReadBackDiffers,
    StoreUnsafe,
    UserCodeError,
    UserError,
)
from midstride.engine.session.outcome import Outcome
from midstride.engine.state.differences import differences
from midstride.engine.testing import final_state


def test_an_exception_of_the_user_starts_with_their_traceback(tmp_path: Path) -> None:
    with pytest.raises(UserCodeError) as caught:
        fit(tmp_path / "run", module=Module(broken))
    text = str(caught.value)
    assert text.startswith("Traceback")
    assert "KeyError: 'colour'" in text
    assert "in broken" in text
    assert "Module.training_step" in text
    assert "midstride/engine" not in text
    assert "fit_loop.py" not in text


class Wordless(RuntimeError):
    def __str__(self) -> str:
        raise ValueError("no words")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (Wordless(), "Wordless"),
        (RuntimeError("0" * 10**6 + " end"), " end"),
        (ExceptionGroup("two", [ValueError("one")]), "ValueError: one"),
    ],
)
def test_an_exception_with_no_or_many_words_is_the_users(tmp_path: Path, error: Exception, said: str) -> None:
    def fail(*_: Any) -> None:
        raise error

    with pytest.raises(UserCodeError, match=r"raised in Module\.training_step") as caught:
        fit(tmp_path / "run", module=Module(fail))
    text = str(caught.value)
    assert said in text
    assert len(text) < 25_000


class TrialPruned(Exception):
    def __init__(self, trial: int, score: float) -> None:
        super().__init__(f"trial {trial} has {score}")
        self.trial = trial


@pytest.mark.parametrize(
    "error", [TrialPruned(3, 0.5), KeyError("colour"), FileNotFoundError(2, "No such file"), StopIteration("no more")]
)
def test_an_exception_of_the_user_is_found_by_its_class(tmp_path: Path, error: Exception) -> None:
    def fail(*_: Any) -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        fit(tmp_path / "run", module=Module(fail))
    assert isinstance(caught.value, UserCodeError)
    assert caught.value.__cause__ is error
    assert str(caught.value).startswith("Traceback")
    assert getattr(caught.value, "trial", 3) == 3
    assert Outcome.of(caught.value).type == "midstride.engine.errors.UserCodeError"
    assert type(pickle.loads(pickle.dumps(caught.value))) is UserCodeError


def test_a_fault_of_the_gpu_in_a_step_is_not_the_users(tmp_path: Path) -> None:
    def fail(*_: Any) -> None:
        raise torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")

    with pytest.raises(torch.AcceleratorError) as caught:
        fit(tmp_path / "run", module=Module(fail))
    assert Outcome.of(caught.value).kind == "died"


def test_a_loss_that_is_not_finite_keeps_earlier_snapshots(tmp_path: Path) -> None:
    with pytest.raises(LossNotFinite, match=r"nan \(epoch 0, batch 3, step 4, rank 0\)") as caught:
        fit(tmp_path / "run", module=Module(infinite))
    assert caught.value.exit_code == 2
    assert sorted(p.name[:12] for p in (tmp_path / "run" / "snapshots").iterdir()) == [f"{s:012d}" for s in (1, 2, 3)]


def test_another_identity_is_refused_or_accepted_by_name(tmp_path: Path) -> None:
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
def test_changed_data_are_refused_and_nothing_is_lost(case: str, tmp_path: Path) -> None:
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
    with pytest.raises(ReadBackDiffers, match=r"user did not restore the state it returned: .*seen"):
        fit(tmp_path, module=Elsewhere(), max_epochs=2)


def test_unrestored_state_is_named_before_the_first_step(tmp_path: Path) -> None:
    words = r"what on_save_checkpoint keeps, before the first step, did not load the state that it saved: .*seen"
    with pytest.raises(NotExact, match=words):
        fit(tmp_path, module=Forgetful())


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
def test_skipped_batches_are_named_once_and_many_are_refused(case: str, caplog: pytest.LogCaptureFixture) -> None:
    batches, first, returned, options, words = SKIPPED[case]
    data = DataLoader(Numbers(batches), 1)
    with pytest.raises(NoLoss, match=words) if words else nullcontext():
        fit(module=Module(sometimes(first, returned)), data=data, **{"max_epochs": 2, **options})
    told = [r.getMessage() for r in caplog.records if "is skipped" in r.getMessage()]
    assert len(told) == 1
    assert "Module.training_step returned" in told[0]
    assert "(epoch 0, batch 0)" in told[0]


def test_a_fit_without_a_loss_is_not_finished_by_a_restart(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(NoLoss, match="any of the 4 batches"):
            fit(tmp_path / "run", module=Module(sometimes(4)))
    assert not (tmp_path / "run" / "last").exists()


class Validates(Module):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", 1.0)


def without(name: str) -> Module:
    """Return a module whose method `name` is set to None on the object, as Lightning allows."""
    setattr(module := Validates(), name, None)
    return module


class Holds(Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen = CatMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        predicted = self.layer(batch)
        self.seen.update(predicted)
        return predicted.mean()


def keeps_average(module: Any, _: Any) -> Any:
    module.average = AveragedModel(module.layer)
    return torch.optim.SGD([module.layer.weight], lr=0.1)


#: what is given -> what is said of it, once
SAID: dict[str, tuple[dict[str, Any], str]] = {
    "a validation without data": ({"module": Validates()}, "Validates.validation_step is never called"),
    "a monitor without a validation": (
        {"callbacks": [BestCheckpoint("val/loss")], "max_epochs": 2},
        "BestCheckpoint has no effect: it monitors val/loss, which the epoch did not log, and there is no validation. "
        "Logged: nothing",
    ),
    "validations that come after the last epoch": (
        {"module": Validates(), "data": Validated(DataLoader(Numbers(), 2)), "check_val_every_n_epoch": 2},
        "check_val_every_n_epoch is 2, and max_epochs 1: no validation will run",
    ),
    "a monitor of validations that come after the last epoch": (
        {
            "module": Validates(),
            "data": Validated(DataLoader(Numbers(), 2)),
            "check_val_every_n_epoch": 2,
            "callbacks": [BestCheckpoint("val/loss")],
        },
        "BestCheckpoint checks val/loss after a validation, and there is none",
    ),
    "a monitor that looks after validations alone, without one": (
        {"callbacks": [BestCheckpoint("val/loss", check_on_train_epoch_end=False)]},
        "BestCheckpoint checks val/loss after a validation, and there is none",
    ),
    "validation data without a step": (
        {"data": Validated(DataLoader(Numbers(), 2))},
        "there are validation loaders, and Module has no validation_step",
    ),
    "validation data and a step set to None": (
        {"module": without("validation_step"), "data": Validated(DataLoader(Numbers(), 2))},
        "there are validation loaders, and Validates has no validation_step",
    ),
    "parameters in no optimizer": (
        {"module": configured(keeps_average)},
        "1 of 4 parameters of Configured that collect gradients are in no optimizer and do not change: layer.bias",
    ),
    "parameters of another module": (
        {"module": configured(lambda m, o: torch.optim.SGD([m.layer.weight, m.layer.bias, torch.ones(1)], lr=0.1))},
        "1 of 3 parameters in the optimizers are not the module's",
    ),
    "layers in eval mode": (
        {"module": Module().eval()},
        "2 of 2 layers of Module are in eval mode and stay in it during training: dropout is off and batch statistics "
        "do not change in all of it. If this is not intended, call train() before fit",
    ),
    "a metric that holds graphs": ({"module": Holds()}, "the metric seen received predictions with an autograd graph"),
}


@pytest.mark.parametrize("case", SAID)
def test_what_takes_no_part_is_named(case: str, caplog: pytest.LogCaptureFixture) -> None:
    arguments, words = SAID[case]
    fit(**arguments)
    assert sum(words in message for message in caplog.messages) == 1, caplog.messages


def test_an_evaluation_without_a_step_is_refused() -> None:
    with pytest.raises(UserError, match="Module has no test_step: nothing would be evaluated"):
        Trainer(enable_progress_bar=False).test(Module(), DataLoader(Numbers(), 2))


@pytest.mark.parametrize("name", ["training_step", "configure_optimizers"])
def test_a_fit_needs_what_was_set_to_none(name: str) -> None:
    with pytest.raises(JobError, match=f"^Validates.{name} is None on this object, and a fit calls it"):
        fit(module=without(name))


def test_predictions_need_what_was_set_to_none() -> None:
    with pytest.raises(UserError, match="Validates has no predict_step: nothing would be evaluated"):
        Trainer(enable_progress_bar=False).predict(without("predict_step"), DataLoader(Numbers(), 2))


def test_a_run_with_snapshots_does_not_start_over(tmp_path: Path) -> None:
    run = tmp_path / "run"
    fit(run, snapshots=None)
    fit(run, snapshots=None)
    fit(run)
    with pytest.raises(UserError, match=r"run has snapshots \(newest: 0{11}4\.\S+\), and with snapshots=None"):
        fit(run, snapshots=None)
    Trainer(max_epochs=1, snapshots=None).fit(Module(), DataLoader(Numbers(), 2), run=str(run), resume="never")


def test_a_place_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match='resume=\'always\': "auto", "never" or the step'):
        Trainer(max_epochs=1).fit(Module(), DataLoader(Numbers(), 2), run=tmp_path, resume="always")  # type: ignore[arg-type]
