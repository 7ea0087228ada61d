"""Audits law 3: over all attempts, each epoch used each sample of its order once.

If the order of samples is a function of seed and epoch, it is computed again and compared, by digests, with the indices
that reached the training step. The samples of a sampler or a stream are compared, also by digests, with those that
reached the training step. In other cases (several loaders, or a resumed run over a stream that restores its own state)
only the positions of an epoch can be counted: each must have been trained on once, and the audit does not claim that
law 3 holds. The metric log must have one row for each step.
"""

import csv
import io
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from midstride.engine.checkpointing.sample_log import BatchRange, digest_of
from midstride.engine.data.bad_samples import ON_REQUEST
from midstride.engine.data.order import InOrder, Shuffled, StridedOrder
from midstride.engine.errors import SnapshotMissing
from midstride.engine.snapshots.catalog import Snapshot, SnapshotCatalog
from midstride.engine.snapshots.metric_rows import join_segments
from midstride.engine.snapshots.parent import open_run, parent_of
from midstride.engine.snapshots.reader import read_part
from midstride.engine.state.bounds import damaged_on_error
from midstride.engine.storage.store import Store

__all__ = ["Audit", "EpochAudit", "audit"]

Indices = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class EpochAudit:
    """Samples used by an epoch.

    Args:
        epoch: the epoch, from 0.
        batches: batches trained on; every rank has its share of each.
        samples: samples in them, padding and repetition included.
        expected: samples in the data set; None where they have no indices, or an order of the user's own.
        once: samples used once.
        repeated: samples used more often, padding aside.
        missing: samples never used, though the epoch is over.
        padding: positions at the end that repeat samples from the start, so that all ranks have the same number.
        left_over: samples that drop_last or limit_train_batches leave out.
        left_out: batches whose loss was not finite, left out of the weights.
        skipped: batches that `skip_batches` left out.
        is_over: whether the epoch has come to its last batch; one that a stop broke off has not.
        is_counted: whether the samples were compared with those the epoch was to have; else only its positions were.
        faults: violations of law 3, as messages.
    """

    epoch: int
    batches: int
    samples: int
    expected: int | None = None
    once: int = 0
    repeated: int = 0
    missing: int = 0
    padding: int = 0
    left_over: int = 0
    left_out: tuple[int, ...] = ()
    skipped: tuple[int, ...] = ()
    is_over: bool = True
    is_counted: bool = True
    faults: tuple[str, ...] = ()


@dataclass(frozen=True)
class Audit:
    """Samples used by a run up to a snapshot.

    Args:
        snapshot: name of that snapshot, the newest one.
        step: optimizer steps up to it.
        rows: rows of the metric log.
        epochs: oldest first.
        faults: of the metric log.
        bad_samples: samples that could not be read and were left out, as text.
        parent: of a fork: the run and the step that it starts from.
    """

    snapshot: str
    step: int
    rows: int
    epochs: tuple[EpochAudit, ...] = ()
    faults: tuple[str, ...] = ()
    bad_samples: tuple[str, ...] = ()
    parent: str = ""

    @property
    def is_clean(self) -> bool:
        """Whether nothing breaks law 3."""
        return not self.faults and not any(epoch.faults for epoch in self.epochs)

    @property
    def is_counted(self) -> bool:
        """Whether the samples of every epoch were compared with those that it was to have."""
        return all(epoch.is_counted for epoch in self.epochs)


def audit(url: str) -> Audit:
    """Audit the run at `url`, a folder or fsspec URL, up to its newest snapshot.

    Raises:
        SnapshotMissing: it has none.
        SnapshotDamaged: that snapshot has changed.
    """
    store = open_run(url)
    catalog = SnapshotCatalog(store)
    snapshots = catalog.snapshots()
    if not snapshots:
        raise SnapshotMissing(f"{url} has no snapshot: samples can be audited from the first snapshot on.")
    newest = snapshots[-1]
    with damaged_on_error(f"{url}/snapshots/{newest.name}"):
        return _audit(store, catalog, newest)


def _audit(store: Store, catalog: SnapshotCatalog, newest: Snapshot) -> Audit:
    account = read_part(store, newest, 0, "samples")
    # Samples read from a state on were not compared with a reading from the start.
    unread = account.get("stateful", ()) if newest.generation > 1 else ()
    planned = {one[0]: BatchRange(*one) for one in account.get("planned", ()) if one[0] not in unread}
    rows = list(csv.DictReader(io.StringIO(join_segments(catalog.rows()))))
    return Audit(
        snapshot=newest.name,
        step=newest.position.step,
        rows=len(rows),
        epochs=tuple(_epochs(account, newest.manifest["facts"], planned)),
        faults=tuple(_faults_of_log([int(row["step"]) for row in rows])),
        bad_samples=tuple(_bad_sample(*one) for one in account.get("bad_samples", ())),
        parent=str(parent_of(store) or ""),
    )


def _epochs(account: dict[str, Any], facts: dict[str, Any], planned: dict[int, BatchRange]) -> Iterator[EpochAudit]:
    """Yield the audit of each epoch, oldest first."""
    stretches = [BatchRange(*one) for one in account["stretches"]]
    for number in dict.fromkeys(stretch.epoch for stretch in stretches):
        own = [stretch for stretch in stretches if stretch.epoch == number]
        left_out = tuple(batch for epoch, batch in account["left_out"] if epoch == number)
        is_over = number < facts["progress"]["epoch"] and number not in account.get("broken_off", ())
        skipped = tuple(batch for epoch, batch in account.get("skipped", ((), 0))[0] if epoch == number)
        found = _EpochAuditor(facts["identity"], own, is_over, left_out, planned.get(number)).audit()
        yield replace(found, skipped=skipped)


def _bad_sample(epoch: int, batch: int, rank: int, index: int, error: str) -> str:
    reason = "was" if error == ON_REQUEST else "could not be read and was"
    return f"sample {index} {reason} left out of epoch {epoch}, batch {batch}, rank {rank}: {error}"


@dataclass
class _EpochAuditor:
    """Compares the planned order of an epoch with its stretches of batches."""

    identity: dict[str, Any]
    stretches: Sequence[BatchRange]
    is_over: bool
    left_out: tuple[int, ...]
    planned: BatchRange | None = None
    faults: list[str] = field(default_factory=list)

    def audit(self) -> EpochAudit:
        first = self.stretches[0]
        self._check_batches()
        plain: dict[str, Any] = {
            "epoch": first.epoch,
            "batches": sum(stretch.end - stretch.first for stretch in self.stretches),
            "samples": sum(stretch.samples for stretch in self.stretches),
            "left_out": self.left_out,
            "is_over": self.is_over,
        }
        if not self._is_known:
            return EpochAudit(**plain, is_counted=self._check_planned(), faults=tuple(self.faults))
        samples = int(self.identity["samples"])
        used, padding = np.zeros(samples, np.int64), 0
        for stretch in self.stretches:
            indices, padded = self._order_of(stretch)
            used += np.bincount(indices, minlength=samples)
            padding += padded
        whole = BatchRange(first.epoch, 0, self._limit(first.world), first.world)
        meant = np.bincount(self._order_of(whole, check=False)[0], minlength=samples)
        return EpochAudit(
            **plain,
            expected=samples,
            once=int((used == 1).sum()),
            repeated=int((used > 1).sum()),
            missing=int(((used == 0) & (meant > 0)).sum()) if self.is_over else 0,
            padding=padding,
            left_over=int((meant == 0).sum()),
            faults=tuple(self.faults),
        )

    @property
    def _is_known(self) -> bool:
        """True if the order is a function of seed and epoch and uses each sample once."""
        identity, first = self.identity, self.stretches[0]
        told = {"samples", "shuffle", "drop_last", "global_batch_size"} <= set(identity) and "sampler" not in identity
        is_function = self.planned is None  # else the data had another number of samples than at first
        return (
            first.indexed
            and told
            and is_function
            and (first.world == 1 or identity.get("use_distributed_sampler", True))
        )

    def _check_batches(self) -> None:
        """Check that every batch was trained on once, up to the end if the epoch is over."""
        at = 0
        for stretch in self.stretches:
            if stretch.first > at:
                self.faults.append(f"{_batches(at, stretch.first)} never reached the training step")
            elif stretch.first < at:
                self.faults.append(f"{_batches(stretch.first, min(at, stretch.end))} reached the training step again")
            at = max(at, stretch.end)
        if self._is_known and self.is_over and at < (end := self._limit(self.stretches[-1].world)):
            self.faults.append(f"{_batches(at, end)} never reached the training step")

    def _check_planned(self) -> bool:
        """Compare with the items of the epoch's sampler or stream. Return False if there are none."""
        planned, used = self.planned, self.stretches
        if planned is None or not self.is_over or any(one.world != planned.world for one in used):
            return False
        if (at := used[-1].end) < planned.end:
            self.faults.append(f"{_batches(at, planned.end)} never reached the training step")
        samples, digest = sum(one.samples for one in used), sum(one.digest for one in used) % (1 << 64)
        if not planned.indexed and digest != planned.digest:
            self.faults.append("the samples that reached the training step are not those that the stream gave")
        elif planned.indexed and (samples, digest) != (planned.samples, planned.digest):
            self.faults.append(
                f"the {samples} samples that reached the training step are not the {planned.samples} that the epoch's "
                "sampler gave"
            )
        return True

    def _order_of(self, stretch: BatchRange, *, check: bool = True) -> tuple[Indices, int]:
        """Return the indices in `stretch` without padding, and the number of padded positions."""
        own, digest, positions = [], 0, 0
        for rank in range(stretch.world):
            order = self._order(rank, stretch.world)
            size = order.batch_size
            all_of_rank = order.indices(stretch.epoch)
            mine = np.array(all_of_rank[stretch.first * size : stretch.end * size], np.int64)
            at = (stretch.first * size + np.arange(len(mine))) * order.size + order.rank
            own.append(mine[at < len(order.sequence)])
            positions += len(mine)
            for batch in range(stretch.first, stretch.end) if check else ():
                digest += digest_of(all_of_rank[batch * size : (batch + 1) * size], batch, rank)
        if check and (digest % (1 << 64), positions) != (stretch.digest, stretch.samples):
            self.faults.append(
                f"{_batches(stretch.first, stretch.end)}: the {stretch.samples} samples that reached the training step "
                f"are not the {positions} of the epoch's order"
            )
        indices = np.concatenate(own)
        return indices, positions - len(indices)

    def _order(self, rank: int, world: int) -> StridedOrder:
        identity = self.identity
        batch_size = identity["global_batch_size"] // identity.get("accumulate_grad_batches", 1) // world
        samples = identity["samples"]
        sequence = Shuffled(samples, identity["seed"]) if identity["shuffle"] else InOrder(samples)
        return StridedOrder(sequence, batch_size, identity["drop_last"], rank, world)

    def _limit(self, world: int) -> int:
        """Return the batches of an epoch."""
        batches, limit = len(self._order(0, world)), self.identity.get("limit_train_batches", 1.0)  # a loop has none
        return min(batches, limit) if isinstance(limit, int) else int(batches * limit)


def _batches(first: int, end: int) -> str:
    return f"batch {first}" if end == first + 1 else f"batches {first} to {end - 1}"


def _faults_of_log(steps: Sequence[int]) -> list[str]:
    if list(steps) == list(range(1, len(steps) + 1)):
        return []
    twice = sorted(step for step, count in Counter(steps).items() if count > 1)[:5]
    holes = sorted(set(range(1, max(steps) + 1)) - set(steps))[:5]
    faults = [f"the metric log has more than one row of step {step}" for step in twice]
    faults += [f"the metric log has no row of step {step}" for step in holes]
    return faults or ["the rows of the metric log are not in the order of steps"]
