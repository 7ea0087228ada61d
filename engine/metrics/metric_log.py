"""The metric log: one row per step, without duplicates and without gaps.

A row stays open until the next step closes it, so values logged by a validation or at the end of an epoch are in the
row of the step before. Rows are written in segments, one per snapshot. The open row is part of the state of a run.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from midstride.engine.metrics.accumulator import Accumulator
from midstride.engine.snapshots.metric_rows import to_csv

__all__ = ["MetricLog", "column_of", "merge_shares"]

Key = TypeVar("Key")


#: one rank's share of a value to reduce over the ranks: value (on any device), weight, reduction
Share = tuple[Any, float, str]
#: the place of a value: step and name
Cell = tuple[int, str]


#: names of values that are names of columns already -> the columns of these values
_COLUMNS = {"epoch": "logged_epoch", "step": "logged_step"}
_NAMES = {column: name for name, column in _COLUMNS.items()}


def column_of(name: str) -> str:
    """Return the column of the values called `name`."""
    return _COLUMNS.get(name, name)


def merge_shares(shares: Sequence[Share]) -> Accumulator:
    """Return the reduction of the shares of several ranks."""
    merged = Accumulator(shares[0][2], sync=True)
    for value, weight, _ in shares:
        merged.add(value, weight)
    return merged


class MetricLog:
    """The rows that are not written yet."""

    def __init__(self) -> None:
        self._pending: dict[str, Any] = {}
        self._pending_shares: dict[str, Share] = {}
        self._open: dict[str, Any] = {}
        self._closed: list[dict[str, Any]] = []
        self._shares: dict[Cell, Share] = {}

    def set_next(self, name: str, value: Any) -> None:
        """Set the value of column `name` in the row of the next step, replacing an earlier one."""
        self._pending[name] = value
        self._pending_shares.pop(name, None)  # of an earlier batch, or of ranks of an earlier attempt

    def set_next_share(self, name: str, share: Share) -> None:
        """Set this rank's share of a value in that row. The next exchange between ranks reduces it."""
        name = column_of(name)
        self._pending[name] = None
        self._pending_shares[name] = share

    def rollback_point(self) -> Callable[[], None]:
        """Return a function that removes everything that is set for the next row from now on."""
        pending, shares = dict(self._pending), dict(self._pending_shares)

        def back() -> None:
            self._pending, self._pending_shares = pending, shares

        return back

    def step(self, epoch: int, step: int) -> None:
        """Close the open row, and open the row of `step` with the values set for it."""
        if self._open:
            self._closed.append(self._open)
        self._open = {"epoch": epoch, "step": step, **self._pending}
        self._pending = {}
        if self._pending_shares:
            self._shares.update({(step, name): share for name, share in self._pending_shares.items()})
            self._pending_shares = {}

    @property
    def newest(self) -> Mapping[str, Any]:
        """Row of the newest step: numbers or tensors; None for values not yet reduced over ranks."""
        if _NAMES.keys().isdisjoint(self._open):
            return self._open
        return {_NAMES.get(name, name): value for name, value in self._open.items()}

    def newest_shares(self) -> dict[str, Accumulator]:
        """Return this rank's share of each value in that row, read from its device."""
        shares: dict[str, Accumulator] = {}
        for column, value in self._open.items():
            name = _NAMES.get(column, column)
            if (share := self._shares.get((self._open["step"], column))) is not None:
                shares[name] = merge_shares([share]).on_host()
            elif value is not None and column not in _COLUMNS:
                shares[name] = Accumulator("sum", sync=False, total=float(value))
        return shares

    def set_current(self, name: str, value: Any) -> None:
        """Set `value` in the row of the last step.

        Before the first step, or after `close` at the end of a fit, set it in the row of the next step.
        """
        if self._open:
            self._open[column_of(name)] = value
        else:
            self.set_next(column_of(name), value)

    def close(self) -> None:
        """Close the last row."""
        if self._open:
            self._closed.append(self._open)
            self._open = {}

    def reopen(self) -> None:
        """Open the row that was closed last, for values that come after the end of training."""
        if self._closed:
            self._open = self._closed.pop()

    @property
    def is_closed(self) -> bool:
        """Whether all rows were closed and drained."""
        return not (self._open or self._closed)

    def shares(self) -> dict[Cell, Share]:
        """Return this rank's shares of values in rows that are not drained yet, and clear them."""
        shares, self._shares = self._shares, {}
        return _on_host(shares)

    def set_reduced(self, cell: Cell, value: float) -> None:
        """Set the reduced value in the row of its shares."""
        step, name = cell
        for row in (*reversed(self._closed), self._open):
            if row.get("step") == step:
                row[name] = value

    def drain(self) -> str:
        """Return the closed rows as CSV, and clear them."""
        rows, self._closed = self._closed, []
        return to_csv([{k: _plain(v) for k, v in row.items() if v is not None} for row in rows])

    def discard(self) -> None:
        """Drop the closed rows of a run without a metric log."""
        self._closed, self._shares = [], {}

    def drop_closed(self) -> None:
        """Drop the closed rows, but not this rank's shares of values in them."""
        self._closed = []

    def state_dict(self) -> dict[str, Any]:
        """Return the open row and the values of the next one; closed rows are in segments."""
        return {
            "open": dict(self._open),
            "pending": dict(self._pending),
            "pending_shares": _on_host(self._pending_shares),
        }

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore the rows."""
        self._open, self._pending = dict(state_dict["open"]), dict(state_dict["pending"])
        self._pending_shares = dict(state_dict["pending_shares"])
        self._closed, self._shares = [], {}

    def resharded(self, states: Sequence[dict[str, Any]], rank: int) -> dict[str, Any]:
        """Return rank 0's rows, with the shares of all ranks for rank 0 and none for the others."""
        shares: dict[str, Share] = {}
        for name in dict.fromkeys(name for state in states for name in state["pending_shares"]):
            running = merge_shares([s["pending_shares"][name] for s in states if name in s["pending_shares"]])
            shares[name] = (running.value, running.weight, running.reduce_fx)
        pending = {**dict.fromkeys(shares), **states[0]["pending"]}
        return {**states[0], "pending": pending, "pending_shares": shares if rank == 0 else {}}


def _on_host(shares: dict[Key, Share]) -> dict[Key, Share]:
    return {key: (float(value), weight, reduce_fx) for key, (value, weight, reduce_fx) in shares.items()}


def _plain(value: Any) -> Any:
    # repr is the shortest text that reads back to the same bits
    return int(value) if isinstance(value, int) else repr(float(value))
