"""Collects the values of `self.log` and reduces them over batches and ranks."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from numbers import Real
from typing import Any, Literal, NamedTuple

from torch import Tensor

from midstride.engine.errors import UserError
from midstride.engine.metrics.accumulator import (
    REDUCTIONS,
    Accumulator,
    over_ranks,
    states_over_ranks,
    steps_over_ranks,
    weighted_over_ranks,
)
from midstride.engine.metrics.metric_log import MetricLog, column_of, merge_shares
from midstride.engine.metrics.torchmetrics_state import TorchmetricsState, is_metric
from midstride.engine.metrics.values import NOT_TAKEN, has_number, number, numbers_in, of_batch, warn_not_taken
from midstride.engine.trees import known_samples, other_length, samples_in, tensors_listed

__all__ = ["LogRequest", "LoggingStage", "MetricLogger", "PendingValues"]

log = logging.getLogger(__name__)

#: the running loop
LoggingStage = Literal["train", "validate", "test", "predict"]

#: a number of samples, or one for each lane; None if only the batch tells
_Weight = int | Mapping[int, int | None] | None

#: the arguments of `TrainingModule.log`: name, on_step, on_epoch, prog_bar, sync_dist, reduce_fx, add_dataloader_idx
LogRequest = tuple[str, bool | None, bool | None, bool, bool, str, bool]


class LogTarget(NamedTuple):
    """Names of a logged value, derived from the arguments of `self.log`; "" if it is not kept."""

    step: str
    epoch: str
    also: str
    sync: bool
    reduce_fx: str
    #: whether only this rank's value of a step is kept, the common case
    plain: bool


class EpochShare(NamedTuple):
    """One rank's share of the values of an epoch, or of an evaluation.

    Args:
        running: logged values, reduced over the rank's batches.
        paths: paths of the logged metrics, by the name of the value.
        steps: values of each step of an evaluation, with their weights.
        newest_step: values of the newest training step, if there are other ranks.
        common_names: see `MetricLogger.common_names`.
    """

    running: dict[str, Accumulator]
    paths: dict[str, str]
    steps: dict[str, list[tuple[float, float]]]
    newest_step: dict[str, Accumulator]
    common_names: dict[str, str]


@dataclass
class PendingValues:
    """Values of this rank, or of one lane, that are not reduced yet.

    Args:
        rows: rows of the metric log.
        running: values of the epoch, by name.
        evaluated: values of the evaluation, by name.
        steps: values of each step of the evaluation, with their weights.
        paths: paths of the logged metrics by the name of the value, of training and of evaluation.
    """

    rows: MetricLog = field(default_factory=MetricLog)
    running: dict[str, Accumulator] = field(default_factory=dict)
    evaluated: dict[str, Accumulator] = field(default_factory=dict)
    steps: dict[str, list[tuple[Any, float]]] = field(default_factory=dict)
    paths: dict[str, dict[str, str]] = field(default_factory=lambda: {"train": {}, "evaluate": {}})


_PLAIN = nullcontext[None]()


class MetricLogger:
    """Holds the values of `self.log` until they are reduced and written to the metric log.

    Args:
        gather: returns every rank's copy of a value, in the order of ranks.
        metrics: the metrics of the module.
        size: number of ranks.
    """

    #: the current batch, for its number of samples; None between batches
    batch: Any = None
    #: the number of its samples, by lane outside of lanes; None if only the batch tells
    weight: _Weight = None
    #: the running loop; see `begin`
    stage: LoggingStage = "train"
    #: whether logged values are kept; see `muted`
    is_recording: bool
    #: a key of NOT_TAKEN while no values are accepted; see `begin`
    closed: str | None = None
    _in_epoch_hook = False
    _loader: int | None = None
    _micro_batches: dict[str, Accumulator] | None

    def __init__(self, gather: Callable[[object], list[Any]], metrics: TorchmetricsState, size: int) -> None:
        self._gather, self.metrics, self._size = gather, metrics, size
        self.pending, self.is_recording, self._micro_batches = PendingValues(), True, None  # steps look these up
        #: the newest values by name, the same on all ranks
        self.values: dict[str, float] = {}
        #: newest values that `values` lacks: of steps of an evaluation, and of the epoch alone if another stage logs
        #: the name for steps and epoch
        self.evaluation_values: dict[str, float] = {}
        #: values of each step of the last evaluation, reduced over the ranks
        self.step_values: dict[str, list[float]] = {}
        #: hyperparameters given to a logger, besides those of module and data; rank 0's are used
        self.hparams: dict[str, Any] = {}
        #: names of the values that were logged with `prog_bar`
        self.progress_bar_names: set[str] = set()
        #: for values logged for steps and for the epoch: name of the step's or the epoch's value -> name without ending
        self.common_names: dict[str, str] = {}
        #: names of the values of the newest step, as of the last exchange between ranks
        self._of_steps: set[str] = set()
        self._targets: dict[LogRequest, LogTarget] = {}
        self._has_warned = False
        #: samples of the batch by its form, once they are asked for
        self._counted: int | None = None
        #: length of the list of tensors in the last batch, if any
        self._listed: int | None = None

    @property
    def rows(self) -> MetricLog:
        """Rows of the metric log that are not drained."""
        return self.pending.rows

    def begin(self, stage: LoggingStage, loader: int | None = None, *, closed: str | None = None) -> None:
        """Assign values to `stage` from now on.

        Args:
            stage: the running loop; "predict" accepts no values.
            loader: number of the evaluated loader, if there are several.
            closed: accept no values from now on: in "setup", after an evaluation is "reduced" or the fit "trained".
        """
        self.stage, self._loader, self.batch, self.weight = stage, loader, None, None
        self._counted = self._listed = None
        self.closed = "predict" if stage == "predict" else closed
        self._targets.clear()

    def begin_batch(self, batch: Any, weight: _Weight = None) -> None:
        """Assign values to `batch` from now on; `weight` is its number of samples, if known."""
        self.batch, self.weight, self._counted = batch, weight, None

    def log(self, asked: LogRequest, value: Any, batch_size: int | None) -> None:
        """Add one value; see `TrainingModule.log`."""
        wanted = self._targets.get(asked) or self._log_target(asked)
        if wanted is None:
            return
        name = asked[0]
        if isinstance(value, Tensor):
            value = number(name, value)
        elif is_metric(value):
            if not self._log_metric(asked, wanted, value):
                return
            wanted, value = wanted._replace(epoch=""), of_batch(name, value)
        elif not isinstance(value, Real):
            raise UserError(f"self.log({name!r}) was given a {type(value).__name__}; a number or a tensor is needed.")
        if wanted.plain and self._micro_batches is None:
            self.pending.rows.set_next(wanted.step, value)
            if self._size == 1:
                self.values[wanted.step] = value  # pyright: ignore[reportArgumentType]  # a number
        else:
            weight: Any = self.weight if batch_size is None else batch_size
            self._accumulate(wanted, value, float(self._samples() if weight is None else weight))

    def samples(self) -> int:
        """Return the number of samples of the current batch, as far as loader or form tell it."""
        return self.weight if isinstance(self.weight, int) else samples_in(self.batch)

    def _samples(self) -> int:
        """Return the samples of the batch by its form; warn once if its form leaves them open."""
        if self._counted is None:
            samples = known_samples(self.batch)
            self._counted = samples or 1
            if not self._has_warned and (doubt := self._doubt(samples)):
                self._has_warned = True
                log.warning(
                    "means of self.log weigh a batch by %s. If %d is not the number of its samples, call "
                    "self.log(..., batch_size=...)",
                    *(doubt, self._counted),
                )
        return self._counted

    def _doubt(self, samples: int | None) -> str | None:
        """Return the reason to doubt `samples`, counted by the form of the batch, or None."""
        before, self._listed = self._listed, tensors_listed(self.batch)
        if samples is None:
            is_open = isinstance(self.batch, list) or hasattr(self.batch, "to")
            return f"1, since a {type(self.batch).__name__} does not tell its samples" if is_open else None
        if (other := other_length(self.batch, samples)) is not None:
            return f"its first tensor, of {samples} rows; another one has {other}"
        if None not in (before, self._listed) and before != self._listed:
            return f"its first tensor, of {samples} rows; lists around it have {before} and {self._listed}"
        return None

    def _log_metric(self, asked: LogRequest, wanted: LogTarget, metric: Any) -> bool:
        """Record a metric for the end of the epoch. Return True to log its batch value, too.

        With the defaults of a training step, the row of a step has that value under a name of its own.
        """
        name, on_step, *_ = asked
        if (path := self.metrics.path(metric)) is None:
            raise UserError(
                f"self.log({name!r}) was given a {type(metric).__name__} that is not an attribute of the module: "
                "its state could not be kept. Assign it in __init__: self.accuracy = Accuracy(...)."
            )
        training = self.stage == "train"
        if not training and path in self.pending.paths["train"].values():
            self.metrics.warn_of_two_stages(path)
        paths = self.pending.paths["train" if training else "evaluate"]
        paths[wanted.epoch or (f"{name}_epoch" if on_step else wanted.step)] = path
        if wanted.also:
            paths[wanted.also] = path
        if on_step is not None or not (wanted.step and has_number(metric)):
            return bool(on_step)
        if wanted.plain:
            value = of_batch(name, metric)
            self.rows.set_next(_step_name(wanted.step), value)
            if self._size == 1:
                self.values[wanted.step] = value  # until the epoch ends
        return not wanted.plain

    def _log_target(self, asked: LogRequest) -> LogTarget | None:
        """Return the target of a request, cached until `begin`; None if the value is dropped."""
        if self.closed == "trained":  # a training that is done does not fail for it
            warn_not_taken(asked[0], self.closed)
            return None
        if self.closed:
            raise UserError(f"self.log({asked[0]!r}) {NOT_TAKEN[self.closed]}")
        stepping = self.stage == "train" and not self._in_epoch_hook
        target = self._targets[asked] = log_target(asked, self.stage, self._loader, stepping=stepping)
        if target.also:
            self.common_names |= dict.fromkeys((target.step, target.also), target.epoch)
        if asked[3]:
            self.progress_bar_names |= {target.step, target.also or target.epoch}
        return target

    def _accumulate(self, wanted: LogTarget, value: Any, weight: float) -> None:
        if wanted.step:
            self._log_step(wanted.step, value, weight, wanted.sync, wanted.reduce_fx)
        if not wanted.epoch:
            return
        every = self.pending.running if self.stage == "train" else self.pending.evaluated
        running = every.get(wanted.epoch)
        if running is None:
            running = every[wanted.epoch] = Accumulator(wanted.reduce_fx, wanted.sync, wanted.also)
        elif (running.reduce_fx, running.sync) != (wanted.reduce_fx, wanted.sync):
            raise UserError(
                f"self.log({wanted.epoch!r}) has reduce_fx={wanted.reduce_fx!r}, sync_dist={wanted.sync}, but had "
                f"reduce_fx={running.reduce_fx!r}, sync_dist={running.sync} in this epoch: use two names."
            )
        running.add(value, weight)
        if self._in_epoch_hook and self._size == 1:
            self.values |= over_ranks([{wanted.epoch: running}])

    def _log_step(self, key: str, value: Any, weight: float, sync: bool, reduce_fx: str) -> None:
        if self._micro_batches is not None:
            self._micro_batches.setdefault(key, Accumulator(reduce_fx, sync)).add(value, weight)
        elif self.stage != "train":
            # No collective inside a step of evaluation: ranks can have different numbers of them.
            self.pending.steps.setdefault(key, []).append((value, weight if sync else 0.0))
            if self._size == 1:
                self.evaluation_values[key] = value
        elif sync and self._size > 1:
            # Reduced when the ranks next meet: an exchange here would hang if one of them did not log.
            self.rows.set_next_share(key, (value, weight, reduce_fx))
        else:
            self.rows.set_next(column_of(key), value)
            if self._size == 1:
                self.values[key] = value
                if key in self.common_names:  # until the epoch ends, the newest step's
                    self.values[self.common_names[key]] = value

    def rollback_point(self) -> Callable[[], None]:
        """Return a function that removes everything that training logs from now on."""
        rows, values = self.rows.rollback_point(), dict(self.values)
        running = {name: replace(one) for name, one in self.pending.running.items()}
        paths = dict(self.pending.paths["train"])

        def back() -> None:
            rows()
            self.values, self.pending.running, self.pending.paths["train"] = values, running, paths

        return back

    @contextmanager
    def epoch_hook(self) -> Iterator[None]:
        """Log values in the block for the epoch by default; they belong to no batch."""
        self._in_epoch_hook, self.batch, self.weight = True, None, None
        self._targets.clear()
        try:
            yield
        finally:
            self._in_epoch_hook = False
            self._targets.clear()

    def mute(self) -> None:
        """Drop values from now on: another rank has them."""
        self.is_recording = False

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Drop values logged in the block, and revert updates of metrics."""
        back, was_recording = self.metrics.rollback_point(), self.is_recording
        self.is_recording = False
        try:
            yield
        finally:
            self.is_recording = was_recording
            back()

    def recording(self) -> AbstractContextManager[None]:
        """Return the context of a user's step. A muted logger also reverts updates of metrics."""
        return _PLAIN if self.is_recording else self.muted()

    @contextmanager
    def micro_batches(self) -> Iterator[None]:
        """Merge values that micro-batches log in the block into one per step; means by samples."""
        logged = self._micro_batches = {}
        try:
            yield
        finally:
            self._micro_batches = None
        for key, running in logged.items():
            self._log_step(key, running.pending_value, running.weight, running.sync, running.reduce_fx)

    def progress_bar_values(self) -> dict[str, float]:
        """Return this rank's `prog_bar` values of the newest step, in the order of logging."""
        row, names = self.rows.newest, self.progress_bar_names
        return {name: float(value) for name, value in row.items() if name in names and value is not None}

    def drain_rows(self) -> str:
        """Remove the closed rows and return them as CSV, reduced over ranks. Call it on all ranks."""
        shares = self._gather_shares(lambda: self.rows.shares())
        cells = dict.fromkeys(cell for rank in shares for cell in rank)
        for cell in cells:
            self.rows.set_reduced(cell, merge_shares([rank[cell] for rank in shares if cell in rank]).value)
        return self.rows.drain()

    def close_epoch(self) -> dict[str, float]:
        """Reduce the epoch or evaluation over batches and ranks. All ranks get the same values."""
        shares = self._gather_shares(self._share_of_epoch)
        reduced = reduced_over_ranks(shares, self.metrics, reset=True)
        self._adopt(reduced, shares)
        if self.stage != "train":
            self.step_values = steps_over_ranks([rank.steps for rank in shares])
            self.evaluation_values |= {name: values[-1] for name, values in self.step_values.items()}
        self._forget(self.stage)
        seconds = {name for rank in shares for name in rank.common_names}
        for name, value in reduced.items():
            if name not in seconds:
                self.rows.set_current(name, value)
        return reduced

    def names_of_steps(self) -> set[str]:
        """Return the names of the values of the newest step, as of the last exchange between ranks."""
        return {*self.rows.newest} if self._size == 1 else self._of_steps

    def _adopt(self, reduced: Mapping[str, float], shares: Sequence[EpochShare]) -> None:
        """Add `reduced` to `values`, with the newest step's if ranks do not exchange each step."""
        if self._size > 1:
            self._of_steps, newest = newest_over_ranks(shares)
            metrics = map(_step_name, union([rank.paths for rank in shares]))
            in_rows_alone = {*metrics} - union([rank.common_names for rank in shares]).keys()
            self.values |= {name: value for name, value in newest.items() if name not in in_rows_alone}
        self.values |= reduced
        self.evaluation_values |= logged_once(reduced, shares)

    def preview_epoch(self) -> None:
        """Add the reduction of the epoch or evaluation so far to `values`, for its last hook."""
        shares = self._gather_shares(self._share_of_epoch)
        self._adopt(reduced_over_ranks(shares, self.metrics, reset=False), shares)

    def _share_of_epoch(self) -> EpochShare:
        """Return this rank's share of the epoch, and of the newest step."""
        training = self.stage == "train"
        running = self.pending.running if training else self.pending.evaluated
        return EpochShare(
            running={name: one.on_host() for name, one in running.items()},
            paths=dict(self.pending.paths["train" if training else "evaluate"]),
            steps=self._steps_on_host(),
            newest_step={} if self._size == 1 else self.rows.newest_shares(),
            common_names=dict(self.common_names),
        )

    def _steps_on_host(self) -> dict[str, list[tuple[float, float]]]:
        """Return the values of each step of an evaluation, with their weights."""
        return {name: [(float(value), weight) for value, weight in steps] for name, steps in self.pending.steps.items()}

    def _gather_shares(self, share: Callable[[], Any]) -> list[Any]:
        """Return the result of `share` on every rank, in the order of ranks."""
        return self._gather(share())

    def _forget(self, stage: LoggingStage) -> None:
        """Clear the values of the epoch, or of the evaluation."""
        if stage == "train":
            self.pending.running.clear()
            self.pending.paths["train"].clear()
        else:
            self.pending.evaluated.clear()
            self.pending.paths["evaluate"].clear()
            self.pending.steps = {}

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's values that are not reduced yet."""
        return {
            "rows": self.rows.state_dict(),
            "values": dict(self.values),
            "names": {"progress_bar": sorted(self.progress_bar_names), "common": dict(self.common_names)},
            "evaluation_values": {name: float(value) for name, value in self.evaluation_values.items()},
            "running": {name: asdict(running) for name, running in self.pending.running.items()},
            "evaluated": {name: asdict(running) for name, running in self.pending.evaluated.items()},
            "steps": self._steps_on_host(),
            "paths": {stage: dict(paths) for stage, paths in self.pending.paths.items()},
        }

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore the state from `state_dict`."""
        self.rows.load_state_dict(state_dict["rows"])
        self.values = dict(state_dict["values"])
        names = state_dict["names"]
        self.progress_bar_names, self.common_names = {*names["progress_bar"]}, dict(names["common"])
        self.evaluation_values = dict(state_dict["evaluation_values"])
        self.pending.running = {name: Accumulator(**running) for name, running in state_dict["running"].items()}
        self.pending.evaluated = {name: Accumulator(**running) for name, running in state_dict["evaluated"].items()}
        self.pending.steps = {name: list(values) for name, values in state_dict["steps"].items()}
        self.pending.paths = {stage: dict(paths) for stage, paths in state_dict["paths"].items()}

    def resharded(self, states: Sequence[dict[str, Any]], rank: int) -> dict[str, Any]:
        """Return the merged values of all ranks for rank 0, and empty ones for the others."""
        kinds = ("running", "evaluated")
        joined: dict[str, Any] = {kind: states_over_ranks([state[kind] for state in states]) for kind in kinds}
        steps = weighted_over_ranks([state["steps"] for state in states])
        if rank:
            joined = {kind: {} for kind in kinds}
            steps = {name: [(0.0, 0.0)] * len(values) for name, values in steps.items()}
        rows = self.rows.resharded([state["rows"] for state in states], rank)
        paths = {stage: union([state["paths"][stage] for state in states]) for stage in self.pending.paths}
        return {**states[0], "rows": rows, **joined, "steps": steps, "paths": paths}


def log_target(asked: LogRequest, stage: LoggingStage, loader: int | None, *, stepping: bool) -> LogTarget:
    """Return the names under which a value is kept.

    Args:
        asked: the arguments of `self.log`.
        stage: the running loop.
        loader: number of the evaluated loader, if there are several.
        stepping: whether a training step runs, not a hook of an epoch or of the whole training.

    Raises:
        UserError: the reduction is unknown, or the value would be kept nowhere.
    """
    name, on_step, on_epoch, _, sync, reduce_fx, add_dataloader_idx = asked
    if reduce_fx not in REDUCTIONS:
        raise UserError(f"self.log({name!r}): no reduce_fx {reduce_fx!r}: choose one of {', '.join(REDUCTIONS)}")
    on_step = stepping if on_step is None else on_step
    on_epoch = not stepping if on_epoch is None else on_epoch
    if not (on_step or on_epoch):
        raise UserError(f"self.log({name!r}, on_step=False): the value would be dropped; set on_epoch=True too.")
    suffix = "" if loader is None or not add_dataloader_idx else f"/dataloader_idx_{loader}"
    return LogTarget(
        step="" if not on_step else _step_name(name) + suffix if on_epoch else name + suffix,
        epoch=name + suffix if on_epoch else "",
        also=f"{name}_epoch{suffix}" if on_step and on_epoch else "",
        sync=sync,
        reduce_fx=reduce_fx,
        plain=on_step and stage == "train" and not (sync or on_epoch) and column_of(name) == name,
    )


def _step_name(name: str) -> str:
    """Return the name of the values of steps, if `name` has the value of the epoch."""
    return f"{name}_step"


def reduced_over_ranks(shares: Sequence[EpochShare], metrics: TorchmetricsState, *, reset: bool) -> dict[str, float]:
    """Return the values of all ranks, reduced; `metrics` are reset afterwards if `reset`."""
    reduced = over_ranks([rank.running for rank in shares])
    paths = union([rank.paths for rank in shares])
    for name, value in zip(paths, metrics.compute(list(paths.values()), reset=reset), strict=True):
        reduced.update(numbers_in(name, value))
    return reduced


def newest_over_ranks(shares: Sequence[EpochShare]) -> tuple[set[str], dict[str, float]]:
    """Return the newest step's values of all ranks, and their names.

    The names are those that some rank logged; the values stand under all their names.
    """
    found = over_ranks([rank.newest_step for rank in shares])
    common = union([rank.common_names for rank in shares])
    return {*found}, {**found, **{common[name]: value for name, value in found.items() if name in common}}


def logged_once(reduced: Mapping[str, float], shares: Sequence[EpochShare]) -> dict[str, float]:
    """Return values in `reduced` logged per epoch, whose names another stage logs per step."""
    common = union([rank.common_names for rank in shares])
    once = {*common.values()} - {common[name] for name in reduced if name in common}
    return {name: value for name, value in reduced.items() if name in once}


def union(ranks: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the entries of all ranks; for a name that several have, the entry of the first."""
    return {name: value for rank in reversed(ranks) for name, value in rank.items()}
