"""Hooks: who is called, in which order, with what; and methods that never would be."""

import pytest
from torch import nn

from midstride.engine import Callback, DataModule, Trainer, TrainingModule
from midstride.engine.errors import UserCodeError
from midstride.engine.modules.hooks import Hooks, bind_step_end, hook_faults

CALLS: list[str] = []


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    CALLS.clear()


class First(Callback):
    def on_train_start(self, trainer: object, module: nn.Module) -> None:
        CALLS.append(f"first {type(trainer).__name__} {type(module).__name__}")


class Second(First):
    def on_train_end(self, trainer: object, module: nn.Module) -> None:
        raise KeyError("a bug")


class Module(TrainingModule):
    def on_train_start(self) -> None:
        CALLS.append("module")


def hooks() -> Hooks:
    return Hooks(Trainer(), Module(), [Second(), First()])


@pytest.mark.parametrize(
    ("of", "called"),
    [
        ("all", ["first Trainer Module", "first Trainer Module", "module"]),
        ("callbacks", ["first Trainer Module"] * 2),
        ("module", ["module"]),
    ],
)
def test_callbacks_go_first_in_their_order_and_the_module_last(of: str, called: list[str]) -> None:
    hooks().call("on_train_start", of=of)  # type: ignore[arg-type]
    assert called == CALLS


def test_only_written_hooks_are_called_and_raising_ones_named() -> None:
    hooks().call("on_fit_start")
    with pytest.raises(UserCodeError, match=r"Second\.on_train_end"):
        hooks().call("on_train_end")


class Misspelt(TrainingModule):
    def on_train_epoch_begin(self) -> None: ...

    def helper(self) -> None: ...


class Lightnings(Callback):
    def on_epoch_end(self, trainer: object, module: object) -> None: ...


class Other(TrainingModule):
    def on_train_epoch_end(self, outputs: object) -> None: ...  # type: ignore[override]

    def validation_step(self, batch: object) -> None: ...  # type: ignore[override]


class OtherState(Callback):
    def load_state_dict(self) -> None: ...  # type: ignore[override]


class Forgetful(Callback):
    def state_dict(self) -> dict[str, int]:
        return {"steps": 1}


class Data(DataModule):
    def on_exception(self, error: BaseException) -> None: ...

    def on_a_good_day(self) -> None: ...


@pytest.mark.parametrize(
    ("module", "callbacks", "data", "named"),
    [
        (Module(), [First()], DataModule(), []),
        (Module(), [], Data(), ["Data.on_exception would never be called: write it in the module or in a callback"]),
        (Misspelt(), [], [], ["Misspelt.on_train_epoch_begin would never be called: write on_train_epoch_end"]),
        (Module(), [Lightnings()], None, ["Lightnings.on_epoch_end would never be called: "]),
        (Other(), [], None, ["Other.on_train_epoch_end(self, outputs) is called as on_train_epoch_end(self): "]),
        (Module(), [Forgetful()], None, ["Forgetful has state_dict, but no load_state_dict: "]),
        (Module(), [OtherState()], None, ["OtherState.load_state_dict(self) is called as load_state_dict(self, state"]),
    ],
)
def test_methods_that_would_never_be_called_are_named(
    module: TrainingModule, callbacks: list[Callback], data: object, named: list[str]
) -> None:
    found = hook_faults(module, callbacks, data)
    assert [message[: len(start)] for message, start in zip(found, named, strict=True)] == named


class Ends(TrainingModule):
    def training_step_end(self, outputs: object) -> object:
        return "outputs", outputs

    def validation_step_end(self, outputs: object, batch: object) -> object:
        return outputs, batch


def test_the_end_of_a_step_takes_the_batch_or_not() -> None:
    assert bind_step_end(Ends(), "training_step")(1, 2) == ("outputs", 1)
    assert bind_step_end(Ends(), "validation_step")(1, 2) == (1, 2)
