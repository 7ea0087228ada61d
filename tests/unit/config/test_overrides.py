"""A method of the user's that cannot be called as that of its base class is named, with both lists of parameters."""

from collections.abc import Callable
from typing import Any

import pytest

from midstride.engine import Callback, Launcher, Logger, Strategy, TrainingModule
from midstride.engine.config.overrides import is_own, override_faults
from midstride.engine.data.loader import FitLoaders
from midstride.engine.strategies.ddp import Ddp
from midstride.engine.strategies.mixins import ReplicatesParameters

WRAP = "is called as wrap(self, step, *, one_backward): write it with these parameters"
BATCH_END = "is called as on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0)"


def derived(base: type, **methods: Any) -> type:
    """Return a class of the user's that derives from `base`."""
    return type("Own", (base,), {"__module__": "model", **methods})


def _as_decorated(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        return method(*arguments, **named)

    call.__wrapped__ = method  # type: ignore[attr-defined]
    return call


#: class -> how each message begins
OWN: dict[str, tuple[type, list[str]]] = {
    "nothing written": (derived(Callback), []),
    "as it is called": (derived(Ddp, wrap=lambda self, step, *, one_backward: step), []),
    "any arguments": (derived(Ddp, wrap=lambda self, *arguments, **named: None), []),
    "decorated": (derived(Ddp, wrap=_as_decorated(lambda self: None)), []),
    "other names": (derived(Callback, load_state_dict=lambda self, state: None), []),
    "one more, with a default": (derived(Ddp, wrap=lambda self, step, *, one_backward, more=1: step), []),
    "a static method": (derived(Ddp, wrap=staticmethod(lambda step: step)), []),
    "a value": (derived(Ddp, wrap=None), []),
    "a private method": (derived(Ddp, _wrap=lambda self: None), []),
    "without what has a default": (
        derived(Callback, on_validation_batch_end=lambda self, trainer, module, outputs, batch, batch_idx: None),
        [],
    ),
    "one is missing": (derived(Ddp, wrap=lambda self, step: step), [f"Own.wrap(self, step) {WRAP}"]),
    "one is too many": (
        derived(Ddp, wrap=lambda self, step, more, *, one_backward: step),
        [f"Own.wrap(self, step, more, *, one_backward) {WRAP}"],
    ),
    "of a base of the user's": (
        type("Own", (derived(Ddp, wrap=lambda self, step: step),), {"__module__": "model"}),
        [f"Own.wrap(self, step) {WRAP}"],
    ),
    "a hook of a callback": (
        derived(Callback, on_validation_batch_end=lambda self, trainer, module: None),
        [f"Own.on_validation_batch_end(self, trainer, module) {BATCH_END}"],
    ),
    "not written": (
        derived(Logger, open=lambda self, run, rows: 0),
        ["Own has no log_rows: write log_rows(self, rows)"],
    ),
    "two faults": (
        derived(ReplicatesParameters, wrap=lambda self: None),
        ["Own has no reduce_gradients: write reduce_gradients(self, parameters)", f"Own.wrap(self) {WRAP}"],
    ),
    "a launcher": (derived(Launcher), ["Own has no command: write command(self, session, job, *, grace_s)"]),
}


@pytest.mark.parametrize("case", OWN)
def test_methods_that_cannot_be_called_are_named(case: str) -> None:
    kind, messages = OWN[case]
    assert [found[: len(start)] for found, start in zip(override_faults(kind), messages, strict=True)] == messages


def test_only_methods_of_a_prefix_are_looked_at() -> None:
    kind = derived(TrainingModule, validation_step=lambda self: None, on_fit_start=lambda self, more: None)
    assert [found.partition(" ")[0] for found in override_faults(kind, "on_")] == ["Own.on_fit_start(self,"]


@pytest.mark.parametrize("kind", [Strategy, Ddp, FitLoaders])
def test_a_class_of_ours_is_not_the_users(kind: type) -> None:
    assert not is_own(kind)
    assert is_own(derived(kind))
