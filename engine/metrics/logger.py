"""Logged values: taken batch by batch, reduced over an epoch and over the ranks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
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
from midstride.engine.metrics.metric_log import MetricLog, merge_shares
from midstride.engine.metrics.torchmetrics_state import TorchmetricsState, is_metric
from midstride.engine.metrics.values import NOT_TAKEN, number, numbers_in, of_batch, warn_not_taken
from midstride.engine.trees import samples_in

__all__ = ["LoggingStage", "MetricLogger"]

#: what is going on
LoggingStage = Literal["train", "validate", "test", "predict"]

#: name, on_step, on_epoch, prog_bar, sync_dist, reduce_fx, add_dataloader_idx: as `TrainingModule.log` was given them
LogRequest = tuple[str, bool | None, bool | None, bool, bool, str, bool]


class _LogTarget(NamedTuple):
    """What `self.log` was asked for, understood: under which names, if any, a value is kept."""

    step: str
    epoch: str
    also: str
    sync: bool
    reduce_fx: str
    #: a step's value of this rank alone, the common case
    plain: bool


class MetricLogger:
    """What `self.log` was given until it is reduced, and the metric log it ends in.

    Args:
        gather: returns every rank's copy of a value, in the order of ranks.
        metrics: the metrics of the module.
        size: ranks.
    """

    #: the key in NOT_TAKEN where no value is taken; see `begin`
    closed: str | None = None

    def __init__(self, gather: Callable[[object], list[Any]], metrics: TorchmetricsState, size: int) -> None:
        self._gather, self.metrics, self._size = gather, metrics, size
        self.rows = MetricLog()
        #: what is going on; see `begin`
        self.stage: LoggingStage = "train"
        #: the batch in hand, for its number of samples; None between batches, in every attempt
        self.batch: Any = None
        #: the newest values by name, alike on every rank
        self.values: dict[str, float] = {}
        #: of the last evaluation, what was logged for each step, over all ranks
        self.step_values: dict[str, list[float]] = {}
        #: hyperparameters that a logger was given beside those of module and data; those of rank 0 count
        self.hparams: dict[str, Any] = {}
        #: names of the values that were logged with `prog_bar`
        self.progress_bar_names: set[str] = set()
        self._running: dict[str, Accumulator] = {}
        self._evaluated: dict[str, Accumulator] = {}
        self._steps: dict[str, list[tuple[Any, float]]] = {}
        self._paths: dict[str, dict[str, str]] = {"train": {}, "evaluate": {}}
        self._in_epoch_end = False
        self._loader: int | None = None
        self._targets: dict[LogRequest, _LogTarget] = {}
        self._micro_batches: dict[str, Accumulator] | None = None
        #: whether what is logged here counts; see `muted`
        self.is_recording = True
        self._plain = nullcontext[None]()

    def begin(self, stage: LoggingStage, loader: int | None = None, *, closed: str | None = None) -> None:
        """Count what is logged from now on to `stage`.

        Args:
            stage: what is going on; "predict" takes no values.
            loader: number of the loader being evaluated, where there are several.
            closed: from now on no value is taken, in "setup", when an evaluation is "reduced" or the fit "trained".
        """
        self.stage, self._loader, self.batch = stage, loader, None
        self.closed = "predict" if stage == "predict" else closed
        self._targets.clear()

    def begin_batch(self, batch: Any) -> None:
        """Take what is logged from now on for `batch`: its number of samples is the weight of a mean."""
        self.batch = batch

    def log(self, asked: LogRequest, value: Any, batch_size: int | None) -> None:
        """Take one value in; see `TrainingModule.log`."""
        wanted = self._targets.get(asked) or self._log_target(asked)
        if wanted is None:
            return
        name = asked[0]
        if isinstance(value, Tensor):
            value = number(name, value)
        elif is_metric(value):
            paths = self._paths["train" if self.stage == "train" else "evaluate"]
            on_step = asked[1]
            paths[wanted.epoch or (f"{name}_epoch" if on_step else wanted.step)] = self._path(name, value)
            if not on_step:
                return
            wanted, value = wanted._replace(epoch=""), of_batch(name, value)
        elif not isinstance(value, Real):
            raise UserError(f"self.log({name!r}) was given a {type(value).__name__}; a number or a tensor is needed.")
        if wanted.plain and self._micro_batches is None:
            self.rows.set_next(wanted.step, value)
            if self._size == 1:
                self.values[wanted.step] = value  # pyright: ignore[reportArgumentType]  # a number
        else:
            self._accumulate(wanted, value, float(samples_in(self.batch) if batch_size is None else batch_size))

    def _log_target(self, asked: LogRequest) -> _LogTarget | None:
        """Return what was asked for, understood, for as long as `begin` is not called; None where nothing is taken."""
        name, on_step, on_epoch, prog_bar, sync, reduce_fx, add_dataloader_idx = asked
        if self.closed == "trained":  # a training that is done does not fail for it
            warn_not_taken(name, self.closed)
            return None
        if self.closed:
            raise UserError(f"self.log({name!r}) {NOT_TAKEN[self.closed]}")
        if name in ("epoch", "step"):
            raise UserError(f"self.log({name!r}): the metric log has a column of that name already; use another.")
        if reduce_fx not in REDUCTIONS:
            raise UserError(f"self.log({name!r}): no reduce_fx {reduce_fx!r}; there are: {', '.join(REDUCTIONS)}")
        training = self.stage == "train"
        stepping = training and not self._in_epoch_end
        on_step = stepping if on_step is None else on_step
        on_epoch = not stepping if on_epoch is None else on_epoch
        if not (on_step or on_epoch):
            raise UserError(f"self.log({name!r}, on_step=False): it would be kept nowhere here; say on_epoch=True too.")
        suffix = "" if self._loader is None or not add_dataloader_idx else f"/dataloader_idx_{self._loader}"
        target = self._targets[asked] = _LogTarget(
            step="" if not on_step else f"{name}_step{suffix}" if on_epoch else name + suffix,
            epoch=name + suffix if on_epoch else "",
            also=f"{name}_epoch{suffix}" if on_step and on_epoch else "",
            sync=sync,
            reduce_fx=reduce_fx,
            plain=on_step and training and not (sync or on_epoch),
        )
        if prog_bar:
            self.progress_bar_names |= {target.step, target.also or target.epoch}
        return target

    def _accumulate(self, wanted: _LogTarget, value: Any, weight: float) -> None:
        if wanted.step:
            self._log_step(wanted.step, value, weight, wanted.sync, wanted.reduce_fx)
        if not wanted.epoch:
            return
        every = self._running if self.stage == "train" else self._evaluated
        running = every.get(wanted.epoch)
        if running is None:
            running = every[wanted.epoch] = Accumulator(wanted.reduce_fx, wanted.sync, wanted.also)
        elif (running.reduce_fx, running.sync) != (wanted.reduce_fx, wanted.sync):
            raise UserError(
                f"self.log({wanted.epoch!r}) was given reduce_fx={wanted.reduce_fx!r}, sync_dist={wanted.sync}, and "
                f"earlier in this epoch reduce_fx={running.reduce_fx!r}, sync_dist={running.sync}: use two names."
            )
        running.add(value, weight)

    def _log_step(self, key: str, value: Any, weight: float, sync: bool, reduce_fx: str) -> None:
        if self._micro_batches is not None:
            self._micro_batches.setdefault(key, Accumulator(reduce_fx, sync)).add(value, weight)
        elif self.stage != "train":
            # No collective inside a step of evaluation: ranks may have different numbers of them.
            self._steps.setdefault(key, []).append((value, weight if sync else 0.0))
        elif sync and self._size > 1:
            # Reduced when the ranks next meet: an exchange here would hang if one of them did not log.
            self.rows.set_next_share(key, (value, weight, reduce_fx))
        else:
            self.rows.set_next(key, value)
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

    def rollback_point(self) -> Callable[[], None]:
        """Return what takes back everything that is logged in training from here on."""
        rows, values = self.rows.rollback_point(), dict(self.values)
        running = {name: replace(one) for name, one in self._running.items()}
        paths = dict(self._paths["train"])

        def back() -> None:
            rows()
            self.values, self._running, self._paths["train"] = values, running, paths

        return back

    @contextmanager
    def epoch_end(self) -> Iterator[None]:
        """Log for the epoch, by default, what is logged within, and what comes after belongs to no batch."""
        self._in_epoch_end, self.batch = True, None
        self._targets.clear()
        try:
            yield
        finally:
            self._in_epoch_end = False
            self._targets.clear()

    def set_values(self, values: Mapping[str, float]) -> None:
        """Have `values` as the newest ones, from another process."""
        self.values = dict(values)

    def mute(self) -> None:
        """Drop what is logged from now on: this rank's values do not count."""
        self.is_recording = False

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Drop what is logged within, and what metrics see: it is there only so that other ranks can go on."""
        back, heard = self.metrics.rollback_point(), self.is_recording
        self.is_recording = False
        try:
            yield
        finally:
            self.is_recording = heard
            back()

    def recording(self) -> AbstractContextManager[None]:
        """Return the context of a step of the user's: where it is muted, it leaves nothing behind."""
        return self._plain if self.is_recording else self.muted()

    @contextmanager
    def micro_batches(self) -> Iterator[None]:
        """Make one value for the step of what the micro-batches of its batch log within, means weighted by samples."""
        logged = self._micro_batches = {}
        try:
            yield
        finally:
            self._micro_batches = None
        for key, running in logged.items():
            self._log_step(key, running.pending_value, running.weight, running.sync, running.reduce_fx)

    def progress_bar_values(self) -> dict[str, float]:
        """Return what the newest step logged with `prog_bar` on this rank, in the order of logging."""
        row, names = self.rows.newest, self.progress_bar_names
        return {name: float(value) for name, value in row.items() if name in names and value is not None}

    def drain_rows(self) -> str:
        """Return the closed rows as CSV, reduced over the ranks, and forget them; every rank calls this."""
        shares = self._gather_shares(lambda: self.rows.shares())
        cells = dict.fromkeys(cell for rank in shares for cell in rank)
        for cell in cells:
            self.rows.set_reduced(cell, merge_shares([rank[cell] for rank in shares if cell in rank]).value)
        return self.rows.drain()

    def close_epoch(self) -> dict[str, float]:
        """Reduce the epoch (or evaluation) that ends, over its batches and the ranks; alike on every rank."""
        shares = self._gather_shares(self._share_of_epoch)
        reduced = self._reduced(shares, reset=True)
        if self.stage != "train":
            self.step_values = steps_over_ranks([rank[2] for rank in shares])
        self._forget(self.stage)
        self.values.update(reduced)
        seconds = {one.also for rank in shares for one in rank[0].values() if one.also}
        for name, value in reduced.items():
            if name not in seconds:
                self.rows.set_current(name, value)
        return reduced

    def preview_epoch(self) -> None:
        """Have what the epoch (or evaluation) that ends has logged so far among `values`: its last hook looks there."""
        self.values.update(self._reduced(self._gather_shares(self._share_of_epoch), reset=False))

    def _reduced(self, shares: list[Any], *, reset: bool) -> dict[str, float]:
        """Return the values of what all ranks have; metrics begin anew if `reset`."""
        reduced = over_ranks([rank[0] for rank in shares])
        metrics = _union([rank[1] for rank in shares])
        for name, value in zip(metrics, self.metrics.compute(list(metrics.values()), reset=reset), strict=True):
            reduced.update(numbers_in(name, value))
        return reduced

    def _share_of_epoch(self) -> Any:
        """Return what this rank has of the epoch that ends: running values, paths of metrics, values of steps."""
        training = self.stage == "train"
        running = self._running if training else self._evaluated
        paths = self._paths["train" if training else "evaluate"]
        return {name: one.on_host() for name, one in running.items()}, dict(paths), self._steps_on_host()

    def _steps_on_host(self) -> dict[str, list[tuple[float, float]]]:
        """Return what was logged for each step of an evaluation, with its weight."""
        return {name: [(float(value), weight) for value, weight in steps] for name, steps in self._steps.items()}

    def _gather_shares(self, share: Callable[[], Any]) -> list[Any]:
        """Return what `share` gives on every rank, in the order of ranks."""
        return self._gather(share())

    def _forget(self, stage: LoggingStage) -> None:
        """Begin another epoch, or evaluation."""
        if stage == "train":
            self._running.clear()
            self._paths["train"].clear()
        else:
            self._evaluated.clear()
            self._paths["evaluate"].clear()
            self._steps = {}

    def state_dict(self) -> dict[str, Any]:
        """Return what is logged and not yet reduced, on this rank."""
        return {
            "rows": self.rows.state_dict(),
            "values": dict(self.values),
            "running": {name: asdict(running) for name, running in self._running.items()},
            "evaluated": {name: asdict(running) for name, running in self._evaluated.items()},
            "steps": self._steps_on_host(),
            "paths": {stage: dict(paths) for stage, paths in self._paths.items()},
        }

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Take it back."""
        self.rows.load_state_dict(state_dict["rows"])
        self.values = dict(state_dict["values"])
        self._running = {name: Accumulator(**running) for name, running in state_dict["running"].items()}
        self._evaluated = {name: Accumulator(**running) for name, running in state_dict["evaluated"].items()}
        self._steps = {name: list(values) for name, values in state_dict["steps"].items()}
        self._paths = {stage: dict(paths) for stage, paths in state_dict["paths"].items()}

    def resharded(self, states: Sequence[dict[str, Any]], rank: int) -> dict[str, Any]:
        """Return for rank 0 what all ranks have logged, put together, and for the others what adds nothing."""
        kinds = ("running", "evaluated")
        joined: dict[str, Any] = {kind: states_over_ranks([state[kind] for state in states]) for kind in kinds}
        steps = weighted_over_ranks([state["steps"] for state in states])
        if rank:
            joined = {kind: {} for kind in kinds}
            steps = {name: [(0.0, 0.0)] * len(values) for name, values in steps.items()}
        rows = self.rows.resharded([state["rows"] for state in states], rank)
        paths = {stage: _union([state["paths"][stage] for state in states]) for stage in self._paths}
        return {"rows": rows, "values": states[0]["values"], **joined, "steps": steps, "paths": paths}


def _union(ranks: list[dict[str, str]]) -> dict[str, str]:
    return {name: path for rank in reversed(ranks) for name, path in rank.items()}
