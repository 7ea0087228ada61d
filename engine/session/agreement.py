"""Agreements: the ranks agree on the next boundary that all of them can still reach; until a request they send nothing.

All ranks pass the same boundaries, but not at the same time: in a validation they may be far apart. A rank with a
request writes a proposal to the store in which the ranks met. A thread of every rank reads it, answers with the first
boundary that its rank can still reach, and makes the rank wait at its next one; the largest answer is the agreed
boundary. There is no deadlock: the answers come from threads, and a rank that waits at an earlier boundary goes on as
soon as all have answered.

It costs a few small requests to the store per second, and nothing in a step. The same thread publishes where its rank
is, for the message when the rank is lost.
"""

import json
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from midstride.engine.errors import WorldError
from midstride.engine.session.liveness import LastSeen
from midstride.engine.session.request import Request, RequestKind
from midstride.engine.world import World

__all__ = ["BoundaryAgreement"]

_POLL_S = 0.1
_ANSWER_S = 5.0  # after which a rank that has not answered counts as dead


class BoundaryAgreement:
    """The part of one rank in the agreements.

    Args:
        pending: returns whether this rank has a request.
        take: returns the request.
        store: torch's key-value store; it is used over connections of its own.
        world: this rank among the others.
        seen: publishes where this rank is; None if that is not wanted.
    """

    def __init__(
        self,
        pending: Callable[[], bool],
        take: Callable[[], Request | None],
        store: Any,
        world: World,
        seen: LastSeen | None,
    ) -> None:
        self._pending, self._take, self._seen, self._world = pending, take, seen, world
        self._store = store.clone()
        self._round = self._boundaries_passed = 0
        self._is_open, self._answered_at = False, 0.0
        self._agreed: tuple[int, Request | None] | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._listen, args=(store.clone(),), name="midstride-agreement", daemon=True
        )
        self._thread.start()

    def at_boundary(self) -> Request | None:
        """Count one boundary; return the request that all ranks answer at it, if there is one."""
        self._boundaries_passed += 1
        if self._pending() and not self._is_open:
            self._store.set(f"proposal/{self._round}", "")
            self._answer(self._store, self._round, self._boundaries_passed)
        return self._request_if_due() if self._is_open else None

    def close(self) -> None:
        """Stop listening."""
        self._closed.set()
        # A thread inside torch when the interpreter ends would abort it; one that asks a frozen store never ends.
        self._thread.join(_ANSWER_S)

    def _listen(self, store: Any) -> None:
        while not self._closed.wait(_POLL_S):
            number = self._round
            try:
                if self._seen is not None:
                    self._seen.publish(store)
                if not self._is_open and store.check([f"proposal/{number}"]):
                    self._answer(store, number, None)
            except RuntimeError:
                return  # the store's host is gone, and with it the world

    def _answer(self, store: Any, number: int, here: int | None) -> None:
        """Answer which boundary this rank can still reach: `here`; if that is None, the one after the last passed."""
        with self._lock:
            if self._is_open or number != self._round:
                return  # the other thread was faster
            self._is_open = True  # first: from here on the main thread waits at its next boundary
            request = self._take()
            answer = {
                "boundary": self._boundaries_passed + 1 if here is None else here,
                "asked": request.kind if request else 0,
                "left_s": request.left_s if request else 0.0,
            }
            # Clocks of machines differ, and may be set: the ranks answer at the same time, and each counts from there.
            self._answered_at = time.monotonic()
            store.set(self._key(self._world.rank), json.dumps(answer))

    def _request_if_due(self) -> Request | None:
        if self._agreed is None:
            self._agreed = self._agree()
        boundary, request = self._agreed
        if self._boundaries_passed < boundary:
            return None
        with self._lock:
            self._agreed, self._round, self._is_open = None, self._round + 1, False
        return request

    def _agree(self) -> tuple[int, Request | None]:
        keys = [self._key(rank) for rank in range(self._world.size)]
        try:
            self._store.wait(keys, timedelta(seconds=_ANSWER_S))
        except RuntimeError as error:
            silent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            raise WorldError(f"ranks {silent} did not answer within {_ANSWER_S:.0f} s: they are dead") from error
        answers = [json.loads(self._store.get(key)) for key in keys]
        boundary = max(answer["boundary"] for answer in answers)
        asked = max(answer["asked"] for answer in answers)
        left_s = min(answer["left_s"] for answer in answers if answer["asked"] == asked)
        return boundary, Request(RequestKind(asked), self._answered_at + left_s) if asked else None

    def _key(self, rank: int) -> str:
        return f"answer/{self._round}/{rank}"
