"""Logged values: taken batch by batch, reduced over an epoch and over the ranks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from numbers import Number
from typing import Any, NamedTuple

from torch import Tensor

from midstride.engine.errors import UserError
from midstride.engine.metric_log import MetricLog
from midstride.engine.metrics import Metrics, is_metric

__all__ = ["Logged"]

REDUCTIONS = ("mean", "sum", "min", "max")


@dataclass
class Running:
    """One value on its way from batches to an epoch.

    Args:
        reduce_fx: mean, sum, min or max.
        sync: reduce over the ranks; otherwise the first rank that has it speaks for all.
        on_step: the value also has one for each step.
        total: weighted sum, sum, smallest or largest so far; None before the first batch.
        weight: samples behind a mean.
    """

    reduce_fx: str
    sync: bool
    on_step: bool = False
    total: Any = None
    weight: float = 0.0

    def add(self, value: Any, weight: float) -> None:
        """Take one batch in."""
        if self.reduce_fx == "mean":
            value = value * weight
            self.weight += weight
        self._join(value)

    def merge(self, other: "Running") -> None:
        """Take another rank's batches in."""
        if other.total is not None:
            self.weight += other.weight
            self._join(other.total)

    def _join(self, value: Any) -> None:
        if self.total is None:
            self.total = value
        elif self.reduce_fx in ("mean", "sum"):
            self.total = self.total + value
        elif (value < self.total) == (self.reduce_fx == "min"):
            self.total = value

    @property
    def value(self) -> float:
        """The value of the epoch."""
        return float(self.total) / self.weight if self.reduce_fx == "mean" else float(self.total)


class _Kind(NamedTuple):
    """What is wanted of a logged value."""

    on_step: bool
    on_epoch: bool
    sync_dist: bool
    reduce_fx: str


class Logged:
    """What `self.log` was given until it is reduced, and the metric log it ends in.

    Args:
        gather: returns every rank's copy of a value, in the order of ranks.
        metrics: the metrics of the module.
        size: ranks.
    """

    def __init__(self, gather: Callable[[object], list[Any]], metrics: Metrics, size: int) -> None:
        self._gather, self.metrics, self._size = gather, metrics, size
        self.rows = MetricLog()
        #: "train", "validate", "test" or "predict"
        self.stage = "train"
        #: the batch in hand, for its number of samples
        self.batch: Any = None
        #: the newest values by name, alike on every rank
        self.values: dict[str, float] = {}
        #: of the last evaluation, what was logged for each step, over all ranks
        self.step_values: dict[str, list[float]] = {}
        #: names to show in the progress bar
        self.shown: set[str] = set()
        self._running: dict[str, Running] = {}
        self._evaluated: dict[str, Running] = {}
        self._steps: dict[str, list[tuple[float, float]]] = {}
        self._paths: dict[str, dict[str, str]] = {"train": {}, "evaluate": {}}
        self._ending = False

    def log(
        self,
        name: str,
        value: Any,
        on_step: bool | None,
        on_epoch: bool | None,
        prog_bar: bool,
        sync_dist: bool,
        reduce_fx: str,
        batch_size: int | None,
    ) -> None:
        """Take one value in; see `TrainingModule.log`."""
        training = self.stage == "train"
        stepping = training and not self._ending
        on_step = stepping if on_step is None else on_step
        on_epoch = not stepping if on_epoch is None else on_epoch
        if name in ("epoch", "step"):
            raise UserError(f"self.log({name!r}): the metric log has a column of that name already; use another.")
        if prog_bar:
            self.shown.add(name)
        if isinstance(value, Tensor):
            value = _number(name, value)
        elif is_metric(value):
            self._paths["train" if training else "evaluate"][name] = self._path(name, value)
            return
        elif not isinstance(value, Number):
            raise UserError(f"self.log({name!r}) was given a {type(value).__name__}; a number or a tensor is needed.")
        if on_step and training and not (sync_dist or on_epoch):  # the common case, without ceremony
            self.rows.pending(name, value)
        else:
            weight = float(_batch_size(self.batch) if batch_size is None else batch_size)
            self._take(name, value, weight, _Kind(on_step, on_epoch, sync_dist, reduce_fx))

    def _take(self, name: str, value: Any, weight: float, kind: _Kind) -> None:
        on_step, on_epoch, sync_dist, reduce_fx = kind
        training = self.stage == "train"
        if reduce_fx not in REDUCTIONS:
            raise UserError(f"self.log({name!r}): no reduce_fx {reduce_fx!r}; there are: {', '.join(REDUCTIONS)}")
        if on_step:
            self._log_step(f"{name}_step" if on_epoch else name, value, weight, sync_dist, reduce_fx)
        if on_epoch:
            running = self._running if training else self._evaluated
            if name not in running:
                running[name] = Running(reduce_fx, sync_dist, on_step)
            running[name].add(value, weight)

    def _log_step(self, key: str, value: Any, weight: float, sync: bool, reduce_fx: str) -> None:
        if self.stage != "train":
            # No collective inside a step of evaluation: ranks may have different numbers of them.
            self._steps.setdefault(key, []).append((float(value), weight if sync else 0.0))
        elif sync and self._size > 1:
            # Reduced when the ranks next meet: an exchange here would hang if one of them did not log.
            self.rows.pending_share(key, (float(value), weight, reduce_fx))
        else:
            self.rows.pending(key, value)
            if self._size == 1:
                self.values[key] = value

    def _path(self, name: str, metric: object) -> str:
        path = self.metrics.path(metric)
        if path is None:
            raise UserError(
                f"self.log({name!r}) was given a {type(metric).__name__} that is not an attribute of the module: "
                "its state could not be kept. Assign it in __init__: self.accuracy = Accuracy(...)."
            )
        return path

    @contextmanager
    def ending_epoch(self) -> Iterator[None]:
        """Log for the epoch, by default, what is logged within."""
        self._ending = True
        try:
            yield
        finally:
            self._ending = False

    def take_rows(self) -> str:
        """Return the closed rows as CSV, reduced over the ranks, and forget them; every rank calls this."""
        shares = self._gather(self.rows.shares())
        places = dict.fromkeys(place for rank in shares for place in rank)
        for place in places:
            having = [rank[place] for rank in shares if place in rank]
            running = Running(having[0][2], sync=True)
            for value, weight, _ in having:
                running.add(value, weight)
            self.rows.settle(place, running.value)
        return self.rows.take()

    def close_epoch(self) -> dict[str, float]:
        """Reduce the epoch (or evaluation) that ends, over its batches and the ranks; alike on every rank."""
        training = self.stage == "train"
        running, paths = (
            (self._running if training else self._evaluated),
            self._paths["train" if training else "evaluate"],
        )
        everyone = self._gather((running, paths, self._steps))
        reduced = _over_ranks([rank[0] for rank in everyone])
        for name, path in _union([rank[1] for rank in everyone]).items():
            reduced.update(_numbers(name, self.metrics.compute(path)))
        if not training:
            self.step_values = _steps_over_ranks([rank[2] for rank in everyone])
            self._steps = {}
        running.clear()
        paths.clear()
        self.values.update(reduced)
        for name, value in reduced.items():
            if f"{name}_epoch" not in reduced:
                self.rows.put(name, value)
        return reduced

    def state_dict(self) -> dict[str, Any]:
        """Return what is logged and not yet reduced, on this rank."""
        return {
            "rows": self.rows.state_dict(),
            "values": dict(self.values),
            "running": {name: asdict(running) for name, running in self._running.items()},
            "evaluated": {name: asdict(running) for name, running in self._evaluated.items()},
            "steps": {name: list(values) for name, values in self._steps.items()},
            "paths": {stage: dict(paths) for stage, paths in self._paths.items()},
        }

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Take it back."""
        self.rows.load_state_dict(state_dict["rows"])
        self.values = dict(state_dict["values"])
        self._running = {name: Running(**running) for name, running in state_dict["running"].items()}
        self._evaluated = {name: Running(**running) for name, running in state_dict["evaluated"].items()}
        self._steps = {name: list(values) for name, values in state_dict["steps"].items()}
        self._paths = {stage: dict(paths) for stage, paths in state_dict["paths"].items()}


def _number(name: str, value: Tensor) -> Any:
    if value.numel() != 1:
        raise UserError(
            f"self.log({name!r}) was given a tensor of shape {tuple(value.shape)}: one number is needed. "
            "Log its mean(), or the entry you mean."
        )
    if value.device.type == "cpu":
        return value.item()
    # Reading it now would make the step wait for the device.
    return value.detach().reshape(()).double()


def _numbers(name: str, value: Any) -> dict[str, float]:
    if isinstance(value, dict):
        return {f"{name}/{key}": float(entry) for key, entry in value.items()}
    if isinstance(value, Tensor) and value.numel() != 1:
        return {f"{name}/{i}": float(entry) for i, entry in enumerate(value.reshape(-1))}
    return {name: float(value)}


def _union(ranks: list[dict[str, str]]) -> dict[str, str]:
    return {name: path for rank in reversed(ranks) for name, path in rank.items()}


def _over_ranks(ranks: list[dict[str, Running]]) -> dict[str, float]:
    values: dict[str, float] = {}
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        having = [rank[name] for rank in ranks if name in rank]
        first = having[0]
        joined = Running(first.reduce_fx, first.sync, first.on_step)
        for running in having if first.sync else having[:1]:
            joined.merge(running)
        values[name] = joined.value
        if first.on_step:
            values[f"{name}_epoch"] = joined.value
    return values


def _steps_over_ranks(ranks: list[dict[str, list[tuple[float, float]]]]) -> dict[str, list[float]]:
    """Return, for each step, the mean over the ranks that have it, weighted by samples."""
    values: dict[str, list[float]] = {}
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        lists = [rank[name] for rank in ranks if name in rank]
        steps = [[steps[i] for steps in lists if i < len(steps)] for i in range(max(map(len, lists)))]
        values[name] = [_weighted(step) for step in steps]
    return values


def _weighted(step: list[tuple[float, float]]) -> float:
    weight = sum(weight for _, weight in step)
    return sum(value * weight for value, weight in step) / weight if weight else step[0][0]


def _batch_size(batch: Any) -> int:
    """Return the samples in `batch`: the length of the first tensor found in it, 1 if there is none."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.ndim else 1
    values = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else ()
    for value in values:
        if isinstance(value, (Tensor, dict, list, tuple)):
            return _batch_size(value)
    return 1
