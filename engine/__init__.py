"""midstride's engine: exact, resumable PyTorch training. It knows nothing of any orchestrator."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from midstride.engine.callbacks import BestCheckpoint, Callback, EarlyStopping, LearningRateMonitor
    from midstride.engine.data.combined import CombinedLoader
    from midstride.engine.module import DataModule, TrainingModule
    from midstride.engine.seeds import seed_everything
    from midstride.engine.trainer import Trainer

__all__ = [
    "BestCheckpoint",
    "Callback",
    "CombinedLoader",
    "DataModule",
    "EarlyStopping",
    "LearningRateMonitor",
    "Trainer",
    "TrainingModule",
    "seed_everything",
]

#: name -> the module it lives in; loaded on first use, so that reading a job needs no torch
_HOMES = {
    "BestCheckpoint": "callbacks",
    "Callback": "callbacks",
    "CombinedLoader": "data.combined",
    "DataModule": "module",
    "EarlyStopping": "callbacks",
    "LearningRateMonitor": "callbacks",
    "Trainer": "trainer",
    "TrainingModule": "module",
    "seed_everything": "seeds",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"midstride.engine.{_HOMES[name]}"), name)
