"""The counterparts of Lightning's own loggers."""

import logging
import os
from collections.abc import Callable
from typing import Any

from midstride.engine.code_origin import module_of
from midstride.engine.errors import JobError

__all__ = ["logger_options"]

log = logging.getLogger(__name__)


def _csv(given: Any) -> None:
    log.warning("CSVLogger is not used: the run's metrics.csv has a row a step")


def _tensorboard(given: Any) -> dict[str, Any]:
    return {"tensorboard": {"log_dir": os.path.join(os.fspath(given.save_dir or "."), given.name)}}  # noqa: PTH118


def _mlflow(given: Any) -> dict[str, Any]:
    own = vars(given)
    return {"mlflow": {"tracking_uri": own["_tracking_uri"], "experiment": own["_experiment_name"]}}


def _wandb(given: Any) -> dict[str, Any]:
    own = vars(given)
    asked = {"project": own["_project"], "dir": own["_save_dir"], "entity": own["_wandb_init"].get("entity")}
    named = {name: value for name, value in asked.items() if value is not None}
    return {"wandb": {**named, "mode": "offline" if own["_offline"] else "online"}}


#: class of Lightning's -> function from such a logger to the options of ours, or None
_COUNTERPARTS: dict[str, Callable[[Any], dict[str, Any] | None]] = {
    "CSVLogger": _csv,
    "MLFlowLogger": _mlflow,
    "TensorBoardLogger": _tensorboard,
    "WandbLogger": _wandb,
}


def logger_options(given: Any) -> list[dict[str, Any]]:
    """Return options of our loggers for Lightning's: one, several, or True, False and None.

    Raises:
        JobError: a logger has no counterpart.
    """
    several = given if isinstance(given, (list, tuple)) else [given]
    return [one for logger in several if (one := _options_of(logger)) is not None]


def _options_of(logger: Any) -> dict[str, Any] | None:
    if logger is None or isinstance(logger, bool):
        return None
    kind = type(logger)
    is_lightnings = module_of(kind).startswith(("lightning.pytorch.loggers.", "pytorch_lightning.loggers."))
    if not is_lightnings or kind.__name__ not in _COUNTERPARTS:
        known = ", ".join(_COUNTERPARTS)
        raise JobError(
            f"Trainer(...): logger: {kind.__name__} has no counterpart. Those of {known} do; for another tracker, "
            "write a Logger (docs/loggers.md) and say loggers=[...]"
        )
    return _COUNTERPARTS[kind.__name__](logger)
