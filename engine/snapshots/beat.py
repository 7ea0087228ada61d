"""Signs of life of the launcher or script that trains a run, for those on other machines.

    <run>/attempts/beat.json    written anew every ten seconds, removed at the end

They cannot see its process. One that finds a sign watches whether it changes, so that no clocks are compared.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from uuid import uuid4

from midstride.engine.errors import RunHeld, SnapshotDamaged
from midstride.engine.formatting import format_seconds
from midstride.engine.processes.process_identity import is_visible, process_identity
from midstride.engine.storage.checksums import NUMBER, encode_document
from midstride.engine.storage.store import Store
from midstride.engine.storage.verification import read_document

__all__ = ["BEAT", "beating", "ensure_none_elsewhere"]

BEAT = "attempts/beat.json"
_EVERY_S = 10.0
#: a sign that has not changed for so long is of a process that has ended
_WATCHED_S = 30.0
#: an older one is not watched
_OLD_S = 600.0
_POLL_S = 1.0
_JOINED_S = 10.0


@contextmanager
def beating(store: Store) -> Iterator[None]:
    """Give signs of life of this process in the run's `store` until the block ends.

    If the store does not take one, the next one follows.
    """
    ended, written = threading.Event(), threading.Event()
    thread = threading.Thread(target=_beat, args=(store, ended, written), name="midstride beat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_JOINED_S)
        if written.is_set():
            with suppress(Exception):  # it grows old
                store.remove(BEAT)


def _beat(store: Store, ended: threading.Event, written: threading.Event) -> None:
    who = process_identity()
    while not ended.wait(_EVERY_S):
        with suppress(Exception):
            store.write(BEAT, encode_document({**who, "time": time.time(), "nonce": uuid4().hex}))
            written.set()


def ensure_none_elsewhere(
    store: Store, say: Callable[[str], object], stop_if_asked: Callable[[], object] = lambda: None
) -> None:
    """Check that no process on another machine trains the run in `store`.

    It takes up to half a minute.

    Args:
        store: of the run.
        say: called with a line before it watches.
        stop_if_asked: called while it watches; an exception that it raises ends that.

    Raises:
        RunHeld: one does.
    """
    found = _read(store)
    if found is None or is_visible(found) or abs(time.time() - found["time"]) > _OLD_S:
        return
    ago = format_seconds(max(0.0, time.time() - found["time"]))
    say(f"{found['host']} trained {store.url} {ago} ago: watching up to {_WATCHED_S:.0f} s whether it still does")
    until = time.monotonic() + _WATCHED_S
    while time.monotonic() < until:
        stop_if_asked()
        time.sleep(_POLL_S)
        if (now := _read(store)) is None:  # it has ended
            return
        if now["nonce"] != found["nonce"]:
            raise RunHeld(
                f"process {now['pid']} on {now['host']} trains {store.url}. Stop it, use another run name, or take the "
                "run over: --take-over, or take_over=True"
            )


def _read(store: Store) -> dict[str, Any] | None:
    try:
        return read_document(store, BEAT, host=str, pid=int, time=NUMBER, nonce=str)
    except (FileNotFoundError, SnapshotDamaged):
        return None
