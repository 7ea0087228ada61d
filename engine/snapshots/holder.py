"""The holder of a run: the process on this machine that advances it now. Needs no torch.

A lease names the process that took it. It holds the run while it trains: under a launcher as long as the launcher
lives, else until the fit ends. A suspended process holds nothing, and one of another machine cannot be seen from here:
both lose the run to the next attempt. Processes on other machines give signs of life: see `beat.py`.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from midstride.engine.errors import RunHeld, SnapshotDamaged
from midstride.engine.formatting import format_seconds
from midstride.engine.processes.lifetime import is_suspended
from midstride.engine.processes.process_identity import is_running
from midstride.engine.session.session import Session
from midstride.engine.snapshots.lease import Lease, newest, newest_process
from midstride.engine.storage.store import Store

__all__ = ["Holder", "ensure_free", "held", "holder_facts", "holder_of"]

_SESSION = "session"


@dataclass(frozen=True)
class Holder:
    """A process that advances a run.

    Args:
        pid: its number.
        since: when it took the run's lease, in seconds since the epoch.
    """

    pid: int
    since: float


def holder_facts() -> dict[str, Any]:
    """Return a lease's entries on its holder, except the identity of its process."""
    session = Session.from_environment()
    return {_SESSION: str(session.folder)} if session else {}


@contextmanager
def held(lease: Lease) -> Iterator[None]:
    """Show other processes of this machine that the block holds `lease`.

    The sign is an open descriptor with a name in /proc, so nothing stays behind, whatever ends the process.
    """
    if not hasattr(os, "memfd_create"):
        yield
        return
    sign = os.memfd_create(_sign(lease))
    try:
        yield
    finally:
        os.close(sign)


def holder_of(store: Store) -> Holder | None:
    """Return the holder of the run in `store`; None if there is none that can be seen from here."""
    try:
        found, lease = newest_process(store), newest(store)
    except SnapshotDamaged:
        return None
    if found is None or lease is None:
        return None
    facts, since = found
    if not is_running(facts) or is_suspended(facts["pid"]):
        return None
    session = facts.get(_SESSION)
    holds = Session(session).is_locked() if session else _shows(facts["pid"], _sign(lease))
    return Holder(facts["pid"], since) if holds else None


def ensure_free(store: Store) -> None:
    """Check that no other process on this machine advances the run in `store`.

    Raises:
        RunHeld: one does.
    """
    if (holder := holder_of(store)) is not None:
        at = time.strftime("%H:%M:%S", time.localtime(holder.since))
        ago = format_seconds(max(0.0, time.time() - holder.since))
        raise RunHeld(
            f"process {holder.pid} on this machine trains {store.url} since {at} ({ago}). Stop it, use another run "
            "name, or take the run over: --take-over, or fit(..., take_over=True)"
        )


def _sign(lease: Lease) -> str:
    return f"midstride-{lease.run_id}-{lease.generation}"


def _shows(pid: int, sign: str) -> bool:
    """Return whether a process shows `sign`; True if it belongs to another user."""
    folder = Path(f"/proc/{pid}/fd")
    try:
        links = list(folder.iterdir())
    except PermissionError:
        return True
    except OSError:  # it has ended
        return False
    return any(_target(link).startswith(f"/memfd:{sign} ") for link in links)


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:  # closed meanwhile
        return ""
