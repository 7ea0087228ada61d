"""`self.logger` of a LightningModule: logs numbers with the run's rows, for trackers."""

import logging
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from torch import Tensor

from midstride.engine.formatting import url_name
from midstride.engine.modules.module import TrainingModule

__all__ = ["LightningLogger"]

log = logging.getLogger(__name__)


class LightningLogger:
    """Logs numbers as `self.log` does, exact over a resume; drops other values with a warning.

    Args:
        module: module whose `self.logger` this is.
    """

    def __init__(self, module: TrainingModule) -> None:
        self._module = module
        self._warned: set[str] = set()

    @property
    def name(self) -> str:
        """Name of the run."""
        return url_name(self.save_dir)

    @property
    def version(self) -> int:
        """0: a run has one version, however often it is resumed."""
        return 0

    @property
    def save_dir(self) -> str:
        """Folder or URL of the run; without a run, the working directory."""
        return self._module.trainer.run_url or str(Path.cwd())

    log_dir = root_dir = save_dir

    @property
    def experiment(self) -> "_Experiment":
        """Substitute for the experiment object of a tracker."""
        return _Experiment(self)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log numbers at the current step of the run; `step` is ignored."""
        for name, value in metrics.items():
            self.log_value("log_metrics", name, value)

    def log_hyperparams(self, params: Any, metrics: Mapping[str, Any] | None = None, **named: Any) -> None:
        """Add hyperparameters to those of the run; each tracker receives them once.

        Args:
            params: a mapping, which may be nested, or a namespace.
            metrics: ignored.
            named: further hyperparameters.
        """
        given = dict(params if isinstance(params, Mapping) else vars(params)) | named
        self._module.trainer.metric_logger.hparams.update({str(key): _plain(value) for key, value in given.items()})

    def log_value(self, method: str, name: str, value: Any) -> None:
        """Log a number passed to `method`; where `self.log` is refused, in the last step's row."""
        logged = self._module.trainer.metric_logger
        if not (isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)):
            self.warn_no_effect(f"{method}({name!r}: {type(value).__name__})")
        elif not logged.closed:
            TrainingModule.log(self._module, name, value)  # a module may have written its own
        elif logged.rows.is_closed:
            self.warn_no_effect(f"{method}({name!r}), where there is no row to stand in,")
        else:
            logged.rows.set_current(name, float(value))

    def warn_no_effect(self, what: str) -> None:
        """Warn on rank 0, once for each `what`, of a call that does not reach a tracker."""
        if what not in self._warned and self._module.trainer.world.is_first:
            log.warning(
                "self.logger.%s has no effect: trackers have the numbers of metrics.csv, from a process of their own. "
                "Log numbers by self.log, and keep other things in files of yours",
                what,
            )
        self._warned.add(what)

    def __getattr__(self, name: str) -> "_NoEffect":
        """Return a substitute for a method of a tracker's logger, which warns when it is called."""
        if name.startswith("_"):
            raise AttributeError(f"the logger of a run has no {name}")
        return _NoEffect(self, name)


class _NoEffect:
    """Substitute for a tracker's method or object, without an effect except for a warning."""

    def __init__(self, logger: LightningLogger, name: str) -> None:
        self._logger, self._name = logger, name

    def __call__(self, *given: Any, **options: Any) -> "_NoEffect":
        """Warn; the returned object has no effect either."""
        self._logger.warn_no_effect(self._name)
        return self

    def __getitem__(self, key: str) -> "_NoEffect":
        return _NoEffect(self._logger, f"{self._name}[{key!r}]")

    def __setitem__(self, key: str, value: object) -> None:
        self._logger.warn_no_effect(f"{self._name}[{key!r}]")

    def __getattr__(self, name: str) -> "_NoEffect":
        if name.startswith("_"):
            raise AttributeError(f"self.logger.{self._name} has no {name}")
        return _NoEffect(self._logger, f"{self._name}.{name}")


class _Experiment(_NoEffect):
    """Logging methods of TensorBoard's writer, W&B's run and MLflow's client."""

    def __init__(self, logger: LightningLogger) -> None:
        super().__init__(logger, "experiment")

    def add_scalar(self, tag: str, scalar_value: Any, *given: Any, **options: Any) -> None:
        """Log a number (TensorBoard)."""
        self._logger.log_value("experiment.add_scalar", tag, scalar_value)

    def add_scalars(self, main_tag: str, tag_scalar_dict: Mapping[str, Any], *given: Any, **options: Any) -> None:
        """Log several numbers (TensorBoard)."""
        for tag, value in tag_scalar_dict.items():
            self._logger.log_value("experiment.add_scalars", f"{main_tag}/{tag}", value)

    def log(self, data: Mapping[str, Any], *given: Any, **options: Any) -> None:
        """Log numbers (W&B)."""
        for name, value in data.items():
            self._logger.log_value("experiment.log", name, value)

    def log_metric(self, run_id: str, key: str, value: Any, *given: Any, **options: Any) -> None:
        """Log a number (MLflow)."""
        self._logger.log_value("experiment.log_metric", key, value)

    def add_hparams(self, hparam_dict: Mapping[str, Any], metric_dict: Mapping[str, Any], *given: Any) -> None:
        """Add hyperparameters (TensorBoard)."""
        self._logger.log_hyperparams(hparam_dict)

    def log_param(self, run_id: str, key: str, value: Any, *given: Any) -> None:
        """Add a hyperparameter (MLflow)."""
        self._logger.log_hyperparams({key: value})

    @property
    def config(self) -> "_Config":
        """Substitute for W&B's `run.config`."""
        return _Config(self._logger)


class _Config(_NoEffect):
    """W&B's `run.config`: its items and `update` add hyperparameters."""

    def __init__(self, logger: LightningLogger) -> None:
        super().__init__(logger, "experiment.config")

    def __setitem__(self, key: str, value: Any) -> None:
        self._logger.log_hyperparams({key: value})

    def update(self, params: Any, *given: Any, **options: Any) -> None:
        """Add hyperparameters."""
        self._logger.log_hyperparams(params)


def _plain(value: Any) -> Any:
    """Return `value` with tensors and arrays of no dimensions as numbers."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    return value.item() if getattr(value, "ndim", None) == 0 else value
