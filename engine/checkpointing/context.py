"""Context of a run: objects that checkpointer and boundary use of any training."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from midstride.engine.checkpointing.finite_losses import FiniteLosses
from midstride.engine.checkpointing.reporter import Reporter
from midstride.engine.config.loggers import LoggerOptions
from midstride.engine.config.options import SnapshotOptions, TrainerOptions
from midstride.engine.fault_injection import PhaseWatcher
from midstride.engine.lanes import Lanes
from midstride.engine.metrics.logger import MetricLogger
from midstride.engine.modules.progress import Progress
from midstride.engine.seeds import DeviceGenerator
from midstride.engine.session.heartbeat import Heartbeat
from midstride.engine.session.requests import SignalRequests
from midstride.engine.strategies.base import Strategy
from midstride.engine.strategies.collective import Collective
from midstride.engine.strategies.mixins import LazyDevice, device_generator, lanes_of
from midstride.engine.world import World

__all__ = ["RunContext", "RunSettings"]


@dataclass(frozen=True)
class RunSettings:
    """The validated settings of a run, except those that choose its devices.

    Args:
        options: how long and how the module trains.
        snapshots: when snapshots are taken; None takes none.
        seed: seed of `seed_everything` and of the order of samples.
        accept_change: keys of the run's identity that may differ from its snapshot.
        identity: further entries of the run's identity.
        loggers: trackers that get the metric log.
        global_batch_size: samples in a training batch over all ranks; None leaves it to the loader's `batch_size`.
    """

    options: TrainerOptions
    snapshots: SnapshotOptions | None
    seed: int
    accept_change: Sequence[str]
    identity: Mapping[str, Any]
    loggers: Sequence[LoggerOptions] = ()
    global_batch_size: int | None = None


@dataclass(frozen=True)
class RunContext:
    """The objects that any training uses between two batches.

    Args:
        settings: settings of the run.
        strategy: how the module runs on its devices; its process group is initialized.
        device: device that batches are moved to.
        heartbeat: tells the launcher's watchdog that this rank makes progress.
        reporter: tells the launcher, or the terminal, what happens.
        requests: requests from outside to stop or to take a snapshot.
        faults: faults that a test injects, or a replay; None for neither.
        metric_logger: collects the values that are logged.
        progress: counts of the run; outside a fit, those of the evaluation.
        finite_losses: checks that training losses are finite.
    """

    settings: RunSettings
    strategy: Strategy
    device: torch.device
    heartbeat: Heartbeat
    reporter: Reporter
    requests: SignalRequests
    faults: PhaseWatcher | None
    metric_logger: MetricLogger
    progress: Progress
    finite_losses: FiniteLosses

    @property
    def options(self) -> TrainerOptions:
        """Options of the training."""
        return self.settings.options

    @property
    def world(self) -> World:
        """The rank of this process, and the number of all ranks."""
        return self.strategy.world

    @property
    def collective(self) -> Collective:
        """The collective by which ranks exchange values."""
        return self.strategy.collective

    @property
    def lanes(self) -> Lanes | None:
        """The lanes that batches are split into; None for a run without lanes."""
        return lanes_of(self.strategy)

    @property
    def generator(self) -> DeviceGenerator | None:
        """The random number generator of a device outside torch, such as XLA's; None for any other."""
        return device_generator(self.strategy)

    def mark_step(self) -> None:
        """Execute the recorded operations of a lazy device such as XLA's."""
        if isinstance(self.strategy, LazyDevice):
            self.strategy.mark_step()

    def inject_fault(self, phase: str, step: int | None = None, *given: object) -> None:
        """Inject the fault planned for this phase and step, if any; the default step is current."""
        if self.faults is not None:
            self.faults.at(self.world.rank, self.progress.step if step is None else step, phase, *given)

    def faults_at(self, phase: str) -> Sequence[Callable[..., None]]:
        """Return functions that inject the faults planned at `phase`, for a loop to call."""
        return [] if self.faults is None else [lambda *given: self.inject_fault(phase, None, *given)]
