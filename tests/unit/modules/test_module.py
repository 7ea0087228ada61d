"""What a TrainingModule keeps of the arguments it was made with."""

import copy
import pickle
import re
from typing import Any

import pytest

from midstride.engine import DataModule, TrainingModule
from midstride.engine.errors import UserError
from midstride.engine.modules.hyperparameters import accepted_arguments


class Net(TrainingModule):
    """Has every kind of argument."""

    def __init__(self, mode: str, *sizes: int, rate: float = 0.1, keep: Any = {}, **others: Any) -> None:  # noqa: B006
        super().__init__()
        self.save_hyperparameters(*keep.get("names", ()), ignore=keep.get("ignore", ()))


class Wide(Net):
    """Has an argument more."""

    def __init__(self, mode: str, width: int = 2) -> None:
        super().__init__(mode, keep={"ignore": "keep"})


class Doubled(Net):
    """Gives its base another value than it was given itself."""

    def __init__(self, mode: str, rate: float = 0.1) -> None:
        super().__init__(mode, rate=2 * rate, keep={"ignore": "keep"})


class Numbers(DataModule):
    """Data that keep their arguments."""

    def __init__(self, count: int, part: Net | None = None) -> None:
        part = part or Net("b", keep={"ignore": "keep"})
        self.save_hyperparameters()


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        ({"ignore": "keep"}, {"mode": "a", "rate": 0.1, "model": "b"}),
        ({"ignore": ("keep", "model")}, {"mode": "a", "rate": 0.1}),
        ({"names": ("rate", "model")}, {"rate": 0.1, "model": "b"}),
        ({"names": ("rate", "model"), "ignore": "model"}, {"rate": 0.1}),
    ],
)
def test_the_arguments_that_are_named_are_kept(keep: dict[str, Any], kept: dict[str, Any]) -> None:
    assert Net("a", 3, keep=keep, model="b").hparams == kept


def test_a_name_that_is_no_argument_is_refused() -> None:
    said = "save_hyperparameters: 'ratte' is no argument here; there are: mode, rate, keep"
    with pytest.raises(UserError, match=re.escape(said)):
        Net("a", keep={"names": ("ratte",)})


def test_of_a_derived_class_the_arguments_of_both_are_kept_and_its_own_value_of_one() -> None:
    assert Wide("a", 4).hparams == {"mode": "a", "width": 4, "rate": 0.1}
    assert Doubled("a").hparams == {"mode": "a", "rate": 0.1}


def test_a_constructor_is_given_what_it_takes_of_what_its_base_kept() -> None:
    kept = {"mode": "a", "width": 4, "rate": 0.1}
    assert accepted_arguments(Wide, kept) == {"mode": "a", "width": 4}
    assert accepted_arguments(Net, kept) == kept


def test_of_data_and_of_a_part_that_is_made_in_a_constructor_each_keeps_its_own() -> None:
    numbers = Numbers(3)
    assert numbers.hparams == {"count": 3, "part": numbers.hparams.part}
    assert numbers.hparams.part.hparams == {"mode": "b", "rate": 0.1}


def test_a_hyperparameter_is_an_attribute_too() -> None:
    hparams = Net("a").hparams
    hparams.rate = 0.2
    assert hparams["rate"] == hparams.rate == 0.2
    del hparams.rate
    with pytest.raises(AttributeError, match="no hyperparameter is called 'rate'; there are: mode"):
        _ = hparams.rate
    assert copy.deepcopy(hparams) == pickle.loads(pickle.dumps(hparams)) == hparams


def test_arguments_are_kept_in_a_constructor_alone() -> None:
    with pytest.raises(RuntimeError, match="must be called in the __init__ of Net"):
        Net("a").save_hyperparameters()
