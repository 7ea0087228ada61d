"""Sends a run's committed rows to one tracker.

Run as `python -m midstride.engine.loggers.delivery`.

The process gets its document as the first line of standard input. Each further line announces a possible new
snapshot; the line "end" announces the end of the training. If the input ends without it, the rank has died and this
process ends. The next attempt of the run asks the tracker for its last row.
"""

import itertools
import json
import logging
import math
import operator
import os
import select
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from midstride.engine.errors import SnapshotError, UserError
from midstride.engine.formatting import url_name
from midstride.engine.loggers.base import CommittedRows, Conclusion, LoggedRun, Logger, Row
from midstride.engine.processes.lifetime import tie_to_parent
from midstride.engine.snapshots.catalog import Snapshot, SnapshotCatalog
from midstride.engine.snapshots.lease import newest
from midstride.engine.snapshots.lineage import Lineage
from midstride.engine.snapshots.parent import open_run
from midstride.engine.snapshots.row_times import RowTimes
from midstride.engine.snapshots.weights import best_to_show, download_tensors
from midstride.engine.state.bounds import damaged_on_error
from midstride.engine.storage.store import Store, StoreOptions

__all__ = ["UNSENT_EXIT_CODE", "Delivery", "DeliveryProcess", "logged_run", "main", "read_run_json", "unsent"]

log = logging.getLogger(__name__)

#: rows of one request
CHUNK = 500
#: seconds between two retries of a tracker that does not respond: at first, and at most
RETRY_S, MOST_RETRY_S = 1.0, 30.0
#: exit code of a logger's process that has reported rows it could not send
UNSENT_EXIT_CODE = 3


class Delivery:
    """Sends the committed rows of one run to one logger.

    Args:
        store: store of the run.
        logger: logger of the tracker; not open.
        generation: generation of this attempt. A newer attempt ends the delivery, since it has its own. None: any.
    """

    def __init__(self, store: Store, logger: Logger, generation: int | None = None) -> None:
        self._store, self._logger, self._generation = store, logger, generation
        self._is_open = False
        self._run: LoggedRun | None = None  # as sent to the tracker
        self._times = RowTimes()
        self._conclusion: Conclusion | None = None  # of a fit that is complete
        self._segment = ""  # name of the snapshot whose rows were read last
        self._step = 0  # of the last row that the tracker has
        self._last = 0  # of the last row that was read

    @property
    def rows_left(self) -> int:
        """Number of steps whose committed rows were read and are not known to be in the tracker."""
        return self._last - self._step

    @property
    def step(self) -> int:
        """The step of the last row that the tracker is known to have."""
        return self._step

    @property
    def is_superseded(self) -> bool:
        """Whether a newer attempt of the run has started."""
        lease = newest(self._store)
        return self._generation is not None and lease is not None and lease.generation > self._generation

    def deliver(self) -> None:
        """Send unsent committed rows. After an error, ask the tracker which rows it has."""
        if self.is_superseded:
            return
        try:
            rows = self._rows()
            for chunk in _chunks(row for row in rows if row.step > self._step):
                self._logger.log_rows(chunk)
                self._step = chunk[-1].step
        except BaseException:
            self._forget()
            raise

    def conclude(self, conclusion: Conclusion) -> None:
        """Send the remaining rows, and how the run ended."""
        self.deliver()
        if self.is_superseded:
            return
        try:
            self._logger.conclude(conclusion)
            self._logger.finish(None)
        except BaseException:
            self._forget()
            raise

    def finish(self) -> None:
        """Send remaining rows, the run's end and the best weights. Finish the run in the tracker."""
        self.deliver()
        if self.is_superseded:
            return
        try:
            if self._conclusion is not None:
                self._logger.conclude(self._conclusion)
            with TemporaryDirectory(prefix="midstride-best-") as folder:
                self._logger.finish(self._best(Path(folder)))
        except BaseException:
            self._forget()
            raise

    def close(self) -> None:
        """Disconnect from the tracker."""
        if self._is_open:
            self._is_open = False
            self._logger.close()

    def _rows(self) -> CommittedRows:
        """Return the rows to check: at first all rows of the run, then those of newer snapshots."""
        catalog = SnapshotCatalog(self._store)
        segments = _segments(catalog, after=self._segment)
        newest = catalog.get(max(segments)) if segments else None
        if newest is not None:
            self._conclusion = _conclusion_of(newest)
            self._times.take(newest.manifest["facts"].get("row_times", ()))
        if newest and self._is_open and logged_run(self._store, newest) != self._run:
            self.close()  # hyperparameters are sent when a run is opened
            segments = _segments(catalog, after="")
        rows = CommittedRows([*segments.values()])
        self._last = max(self._last, rows.last_step)
        if not self._is_open:
            self._run = logged_run(self._store, newest)
            self._run = replace(self._run, times=self._times)
            self._step = _as_step(self._logger.open(self._run, rows), self._logger)
            self._is_open = True
        self._segment = max(segments, default=self._segment)
        return rows

    def _forget(self) -> None:
        """Let the next call ask the tracker for its last row."""
        self._segment = ""
        try:
            self.close()
        except Exception as error:
            log.debug("the logger could not be closed: %s", error)

    def _best(self, folder: Path) -> Path | None:
        """Download the best weights to `folder` and return the file; None if no monitor has any."""
        weights = best_to_show(self._store)
        return download_tensors(self._store, weights, folder / "best.safetensors") if weights else None


def _conclusion_of(newest: Snapshot) -> Conclusion | None:
    progress = newest.manifest["facts"].get("progress", {})
    if not progress.get("finished"):
        return None
    return Conclusion("done", str(progress.get("why", "")), newest.position.step)


def _as_step(returned: Any, logger: Logger) -> int:
    try:
        return operator.index(returned)  # an integer of numpy, too
    except TypeError:
        raise UserError(
            f"{type(logger).__name__}.open returned {returned!r}: return the step of the tracker's last row, or 0"
        ) from None


def _segments(catalog: SnapshotCatalog, after: str) -> dict[str, str]:
    """Return the rows of the snapshots after the one called `after`, without damaged ones.

    A snapshot that is removed meanwhile looks damaged, but not twice.
    """
    before: list[str] | None = None
    while True:
        faults: list[str] = []
        segments = catalog.segments(faults, after=after)
        if not faults or faults == before:
            return segments
        before = faults


def logged_run(store: Store, newest: Snapshot | None = None) -> LoggedRun:
    """Return the run in a store, for loggers.

    Args:
        store: store of the run.
        newest: newest snapshot of the run, with the hyperparameters logged in training.

    Raises:
        FileNotFoundError: there is no run.
        SnapshotDamaged: its run.json is damaged.
    """
    document = read_run_json(store)
    name = url_name(store.url)
    logged = newest.manifest["facts"].get("hparams", {}) if newest else {}
    found = [_flat(told) for told in (document.get("identity", {}), document.get("hparams", {}), logged)]
    return LoggedRun(name, store.url, Lineage.of(store).run_id, dict(itertools.chain(*found)))


def read_run_json(store: Store) -> dict[str, Any]:
    """Return the run.json of the newest attempt of the run in `store`. Raises like `logged_run`."""
    with damaged_on_error(f"{store.url}/run.json"), store.reading("run.json"):
        return {**json.loads(store.read("run.json"))}


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, entry in value.items():
            yield from _flat(entry, f"{path}.{name}" if path else str(name))
    elif path:
        is_finite = not isinstance(value, float) or math.isfinite(value)
        yield path, value if is_finite else str(value)  # NaN would differ from itself


def _chunks(rows: Iterator[Row]) -> Iterator[list[Row]]:
    while chunk := list(itertools.islice(rows, CHUNK)):
        yield chunk


class DeliveryProcess:
    """The loop of a process that delivers: wakes for new snapshots, and to retry a tracker.

    Args:
        delivery: the delivery to make.
        name: name of the logger, for messages.
        url: URL of the run, for messages.
        wait_s: seconds to wait for a tracker after the training is over.
        last: last call of the delivery; by default its `finish`.
    """

    def __init__(
        self, delivery: Delivery, name: str, url: str, wait_s: float, last: Callable[[], None] | None = None
    ) -> None:
        self._last = last or delivery.finish
        self._delivery, self._name, self._url, self._wait_s = delivery, name, url, wait_s
        self._retry_s = RETRY_S
        self._is_away = False
        self._error = ""

    def run(self, lines: int) -> bool:
        """Deliver until the file descriptor `lines` announces the end. Return True if complete."""
        due: float | None = 0.0  # seconds until the next try; None waits for a line
        while True:
            ready, _, _ = select.select([lines], [], [], due)
            if ready:
                text = os.read(lines, 65536)
                if b"end" in text:
                    return self._finish()
                if not text:
                    return False  # the rank has died
            due = None if self._tried(self._delivery.deliver) else self._retry_s

    def _finish(self) -> bool:
        deadline = time.monotonic() + self._wait_s
        while not self._tried(self._last):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                rows_left = self._delivery.rows_left  # 0 if weights are missing, or rows could not be read
                steps = f"; {rows_left} steps are left" if rows_left else ""
                why = f"{self._error}, for {self._wait_s:g} s after the end{steps}"
                print(unsent(self._name, self._url, why), file=sys.stderr, flush=True)
                return False
            time.sleep(min(self._retry_s, left_s))
        self._delivery.close()
        return True

    def _tried(self, act: Any) -> bool:
        """Return whether `act` succeeded; print an error once."""
        try:
            act()
        except Exception as error:
            self._error = (str(error).splitlines() or [type(error).__name__])[0]
            if not self._is_away:
                print(
                    f"{self._name}: {type(error).__name__}: {self._error}. Training continues; rows are sent once "
                    f"the tracker responds",
                    file=sys.stderr,
                    flush=True,
                )
            self._retry_s = min(self._retry_s * 2, MOST_RETRY_S) if self._is_away else RETRY_S
            self._is_away = True
            return False
        self._is_away = False
        return True


def unsent(name: str, url: str, why: str) -> str:
    """Return a message on rows of the run at `url` that `name` has not sent, with the command."""
    return (
        f"{name}: not everything of {url} was sent: {why}. midstride export {shlex.quote(url)} --to {name} sends them"
    )


def main() -> None:
    """Run the process that the first line of standard input describes."""
    tie_to_parent()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # they are meant for the rank; this process ends after it
    sys.stdout = sys.stderr
    document = json.loads(_first_line())
    sys.path[:] = document["path"]
    from midstride.engine.config.loggers import LoggerOptions
    from midstride.engine.loggers.build_logger import build_logger

    options = LoggerOptions.model_validate(document["logger"])
    store = open_run(document["url"], StoreOptions(lease=document["lease"]))
    delivery = Delivery(store, build_logger(options), document["generation"])
    try:
        ends = partial(delivery.conclude, Conclusion(**told)) if (told := document["conclusion"]) else None
        process = DeliveryProcess(delivery, options.path, document["url"], options.wait_s, ends)
        done = process.run(sys.stdin.fileno())
    except SnapshotError as error:
        print(f"{options.path}: {error}", file=sys.stderr, flush=True)
        done = False
    sys.exit(0 if done else UNSENT_EXIT_CODE)


def _first_line() -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        if not (byte := os.read(0, 1)):
            sys.exit(1)
        line += byte
    return line


if __name__ == "__main__":
    main()
