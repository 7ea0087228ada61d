"""A run that a process of this machine trains is not taken from it by accident."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.nets import Net
from torch.utils.data import DataLoader, TensorDataset

from midstride.engine import Trainer
from midstride.engine.errors import RunHeld
from midstride.engine.processes.process_identity import process_identity
from midstride.engine.session.session import Session
from midstride.engine.snapshots import holder
from midstride.engine.snapshots.holder import ensure_free, held, holder_of
from midstride.engine.snapshots.lease import Lease, acquire
from midstride.engine.storage.store import Store


@contextmanager
def session(*, locked: bool) -> Iterator[dict[str, Any]]:
    one = Session.create({"run": "a"})
    with ExitStack() as stack:
        stack.callback(one.remove)
        if locked:
            stack.enter_context(one.locked())
        yield {"session": str(one.folder)}


@contextmanager
def nothing() -> Iterator[dict[str, Any]]:
    yield {}


#: what the lease says of this process in addition, whether it shows the sign, and whether it holds the run
HOLDERS: dict[str, tuple[Callable[[], Any], bool, bool]] = {
    "a fit": (nothing, True, True),
    "a fit that has ended": (nothing, False, False),
    "a rank whose launcher lives": (lambda: session(locked=True), False, True),
    "a rank whose launcher has ended": (lambda: session(locked=False), True, False),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_a_process_that_trains_holds_its_run(name: str, tmp_path: Path) -> None:
    facts, shows, holds = HOLDERS[name]
    store = Store.open(tmp_path / "run")
    with facts() as added, ExitStack() as stack:
        lease = acquire(store, None, {**process_identity(), **added})
        if shows:
            stack.enter_context(held(lease))
        found = holder_of(store)
        assert (found is not None and found.pid == os.getpid()) == holds
        if holds:
            with pytest.raises(
                RunHeld, match=rf"process {os.getpid()} on this machine trains .*/run since .*--take-ov"
            ):
                ensure_free(store)
        else:
            ensure_free(store)


def of_another_boot(store: Store, lease: Lease, patch: pytest.MonkeyPatch) -> None:
    acquire(store, None, {**process_identity(), "boot": "another"})


def without_facts(store: Store, lease: Lease, patch: pytest.MonkeyPatch) -> None:
    acquire(store, None, {})


def suspended(store: Store, lease: Lease, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(holder, "is_suspended", lambda pid: True)


def damaged(store: Store, lease: Lease, patch: pytest.MonkeyPatch) -> None:
    store.write(f"lease/{lease.generation:06d}.json", b"{}")


@pytest.mark.parametrize("change", [of_another_boot, without_facts, suspended, damaged])
def test_other_leases_hold_nothing(
    change: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.open(tmp_path / "run")
    lease = acquire(store, None, process_identity())
    with held(lease):
        assert holder_of(store) is not None
        change(store, lease, monkeypatch)
        assert holder_of(store) is None


def test_a_fit_takes_a_held_run_only_if_told(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "run")

    def fit(**options: bool) -> None:
        Trainer(max_epochs=1).fit(Net(), DataLoader(TensorDataset(torch.ones(4, 1))), run=store.url, **options)

    with held(acquire(store, None, process_identity())):
        with pytest.raises(RunHeld):
            fit()
        assert store.list("lease") == ["000001.json"]
        fit(take_over=True)
    fit()  # the fit before has ended, in a process that lives
    assert store.list("lease") == ["000001.json", "000002.json", "000003.json"]
