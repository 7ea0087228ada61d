"""What a TrainingModule keeps of the arguments it was made with."""

import re
from typing import Any

import pytest

from midstride.engine import TrainingModule
from midstride.engine.errors import UserError


class Net(TrainingModule):
    """Has every kind of argument."""

    def __init__(self, mode: str, *sizes: int, rate: float = 0.1, keep: Any = {}, **others: Any) -> None:  # noqa: B006
        super().__init__()
        self.save_hyperparameters(*keep.get("names", ()), ignore=keep.get("ignore", ()))


class Wide(Net):
    """Has an argument more."""

    def __init__(self, mode: str, width: int = 2) -> None:
        super().__init__(mode, keep={"ignore": "keep"})


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


def test_of_a_derived_class_what_both_have_is_kept() -> None:
    assert Wide("a", 4).hparams == {"mode": "a"}
