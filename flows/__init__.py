"""Prefect flows, and the command line that runs them.

Any flow can use them as subflows:

    from midstride.flows import evaluate, nightly, train

train           `train`: prepare, launch, evaluate, report
evaluate        `evaluate`: test a run, also while it trains
nightly         `nightly`: train on new data, promote the result if it is better
run_states      names, tags and final states of flow runs
cli             the command line `midstride`
terminal        a flow on a terminal: one bar while it runs, one panel when it ends
deployment      a flow, a resolved job and a schedule, as Prefect's server keeps them
serve           scheduled runs, in processes of this one
server          Prefect's server: the configured one, or one started for one command
server_setup    automations for unattended runs on a self-hosted server

Tests: tests/unit/flows, tests/flows
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from midstride.flows.evaluate import evaluate
    from midstride.flows.nightly import nightly
    from midstride.flows.train import train

__all__ = ["evaluate", "nightly", "train"]


class _Flows(ModuleType):
    """The package. Its flows are flows, even after an import of their modules."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in __all__ and isinstance(value, ModuleType)):  # as importing a module of the package would set it
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{name}"), name)


sys.modules[__name__].__class__ = _Flows
