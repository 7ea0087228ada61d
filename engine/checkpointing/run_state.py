"""State of a run for the checkpointer: named parts, loaders, facts of each snapshot."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from midstride.engine.checkpointing.hook_changes import HookChanges
from midstride.engine.checkpointing.identity import environment_of, identity_of
from midstride.engine.checkpointing.sample_log import SampleLog
from midstride.engine.checkpointing.settings import Settings
from midstride.engine.checkpointing.text_order import text_order_facts
from midstride.engine.data.loader import FitLoaders
from midstride.engine.state.stateful import Stateful

__all__ = ["RunFacts", "RunState", "facts_of"]


class RunFacts(ABC):
    """Facts of a run as JSON values in each snapshot, compared by a later attempt."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return everything that has to be the same in every attempt; every rank calls this."""

    @abstractmethod
    def classes(self) -> set[type]:
        """Return the classes of the objects that take part in the training."""

    def environment(self) -> dict[str, Any]:
        """Return properties of this attempt that may change last bits, beside machine and versions."""
        return {}

    @abstractmethod
    def hyperparameters(self) -> dict[str, Any]:
        """Return "hparams": hyperparameters for trackers outside of the identity, if any."""

    @abstractmethod
    def of_weights(self) -> dict[str, Any]:
        """Return metadata of the weights as they are now."""


@dataclass(frozen=True)
class RunState:
    """Everything that a checkpointer saves, restores and compares.

    Args:
        parts: everything that decides how the run continues, by name, in the order of the restore.
        loaders: loaders of the batches; also one of the parts.
        samples: log of the samples that were trained on; also one of the parts.
        settings: settings of optimizers and schedulers, as this attempt makes them.
        facts: module, data and settings of the run.
        weights: returns the part of the module's state_dict that this rank writes; every rank calls it.
        watched: yields names and values that user code may change and no part holds.
        places: returns the places in snapshots of all objects that a restore fills, by their addresses.
        code: returns the user's classes and functions that train; what they read is compared at a resume.
        way_to_keep: advice on how to keep such a value.
        hook_changes: names hooks that change the training while a snapshot is taken; None if there are no hooks.
        reading: entered while the states of all parts are read.
    """

    parts: Mapping[str, Stateful]
    loaders: FitLoaders
    samples: SampleLog
    settings: Settings
    facts: RunFacts
    weights: Callable[[], dict[str, Any]]
    watched: Callable[[], Iterator[tuple[str, object]]]
    places: Callable[[], Mapping[int, str]]
    code: Callable[[], Iterable[object]]
    way_to_keep: str
    hook_changes: HookChanges | None = None
    reading: Callable[[], AbstractContextManager[None]] = nullcontext


def facts_of(facts: RunFacts, device: torch.device) -> dict[str, Any]:
    """Return the run's "identity", and "bits", its environment; every rank calls this."""
    return {
        "identity": identity_of(facts.identity()),
        "bits": {**environment_of(facts.classes(), device), **facts.environment()},
        **text_order_facts(),
    }
