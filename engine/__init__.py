"""midstride's engine: exact, resumable PyTorch training, without an orchestrator.

Packages are drawn on their floors in docs/architecture.md, and draw their files themselves. Beside them stand:

world            the world a process belongs to: read from the environment once, then handed on whole
slurm            a step of Slurm's, as `srun` describes it to its tasks
seeds            seeds: hashed, never drawn; and the state of the main generators
lanes            equal parts of every global batch, which any number of ranks computes in the same way
trees            nests of containers: batches moved and rebuilt, trees of state mapped leaf by leaf
user_code        calls of the user's code: an exception in it is the user's, and says where
code_origin      whose code it is: the user's, a library's, Python's, or ours
errors           every error the engine raises on purpose
fault_injection  faults on purpose: kill, raise or hang at a rank, a step and a phase
formatting       numbers and tables as a person reads them
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from midstride.engine.processes.preload import collector_paused

if TYPE_CHECKING:
    from midstride.engine.config.job import TrainingJob
    from midstride.engine.data.combined import CombinedLoader
    from midstride.engine.launch.launchers.base import Launcher
    from midstride.engine.loggers.base import Logger
    from midstride.engine.loop.loop import Loop
    from midstride.engine.modules.averaging import WeightAveraging
    from midstride.engine.modules.callbacks import Callback, LearningRateMonitor, TrainedWeights
    from midstride.engine.modules.hyperparameters import Hyperparameters
    from midstride.engine.modules.interface import TrainerInterface
    from midstride.engine.modules.module import DataModule, TrainingModule
    from midstride.engine.modules.monitors import BestCheckpoint, EarlyStopping
    from midstride.engine.modules.schedules import GradientAccumulationScheduler, Unfreeze
    from midstride.engine.modules.timers import Throughput, Timer
    from midstride.engine.seeds import seed_everything
    from midstride.engine.storage.store import Store
    from midstride.engine.strategies.base import Strategy
    from midstride.engine.training.trainer import Trainer
    from midstride.engine.world import World

    __version__: str

__all__ = [
    "BestCheckpoint",
    "Callback",
    "CombinedLoader",
    "DataModule",
    "EarlyStopping",
    "GradientAccumulationScheduler",
    "Hyperparameters",
    "Launcher",
    "LearningRateMonitor",
    "Logger",
    "Loop",
    "Store",
    "Strategy",
    "Throughput",
    "Timer",
    "TrainedWeights",
    "Trainer",
    "TrainerInterface",
    "TrainingJob",
    "TrainingModule",
    "Unfreeze",
    "WeightAveraging",
    "World",
    "__version__",
    "seed_everything",
]

#: name -> the module it lives in; loaded on first use, so that reading a job needs no torch
_HOMES = {
    "BestCheckpoint": "modules.monitors",
    "Callback": "modules.callbacks",
    "CombinedLoader": "data.combined",
    "DataModule": "modules.module",
    "EarlyStopping": "modules.monitors",
    "GradientAccumulationScheduler": "modules.schedules",
    "Hyperparameters": "modules.hyperparameters",
    "Launcher": "launch.launchers.base",
    "LearningRateMonitor": "modules.callbacks",
    "Logger": "loggers.base",
    "Loop": "loop.loop",
    "Store": "storage.store",
    "Strategy": "strategies.base",
    "Throughput": "modules.timers",
    "Timer": "modules.timers",
    "TrainedWeights": "modules.callbacks",
    "Trainer": "training.trainer",
    "TrainerInterface": "modules.interface",
    "TrainingJob": "config.job",
    "TrainingModule": "modules.module",
    "Unfreeze": "modules.schedules",
    "WeightAveraging": "modules.averaging",
    "World": "world",
    "seed_everything": "seeds",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("midstride")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with collector_paused():
        return getattr(import_module(f"midstride.engine.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
