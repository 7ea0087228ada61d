"""Agreements: how ranks find a boundary that all of them have still before them, silent until one of them has to.

All ranks pass the same boundaries, but not at the same time: in a validation they may be far apart. A rank that is
asked for something proposes, in the store in which the ranks met. A thread in every rank sees it, says which boundary
that rank can still make, and has it wait at the next one; the largest of these numbers is the agreed one. No rank
waits for one that waits for another: the answers come from threads, and a rank that waits at a boundary before the
agreed one goes on as soon as all have answered.

It costs a few small questions to the store a second, and nothing in a step. The same thread tells the others where
its rank is, for when it is lost.
"""

import json
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from midstride.engine.errors import WorldError
from midstride.engine.session.liveness import LastSeen
from midstride.engine.session.request import Request, RequestKind
from midstride.engine.world import World

__all__ = ["BoundaryAgreement"]

_POLL_S = 0.1
_ANSWER_S = 5.0  # a rank that has not answered by then is dead, or as good as dead


class BoundaryAgreement:
    """One rank's side.

    Args:
        pending: whether something is asked of this rank.
        take: returns it.
        store: torch's key-value store; used under its own connections.
        world: this rank among the others.
        seen: tells them where this one is, if anything does.
    """

    def __init__(
        self,
        pending: Callable[[], bool],
        take: Callable[[], Request | None],
        store: Any,
        world: World,
        seen: LastSeen | None = None,
    ) -> None:
        self._pending, self._take, self._seen, self._world = pending, take, seen, world
        self._store = store.clone()
        self._round = self._boundaries_passed = 0
        self._is_open = False
        self._agreed: tuple[int, Request | None] | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._listen, args=(store.clone(),), name="midstride-agreement", daemon=True
        )
        self._thread.start()

    def boundary(self) -> Request | None:
        """Count one boundary; return what all ranks do at it."""
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
        """Say which boundary this rank can still make: where it stands, or the next one if it may be leaving it."""
        with self._lock:
            if self._is_open or number != self._round:
                return  # the other thread was faster
            self._is_open = True  # first: from here on the main thread waits at its next boundary
            request = self._take()
            answer = {
                "boundary": self._boundaries_passed + 1 if here is None else here,
                "asked": request.kind if request else 0,
                "deadline": request.deadline if request else 0.0,
            }
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
        deadline = min(answer["deadline"] for answer in answers if answer["asked"] == asked)
        return boundary, Request(RequestKind(asked), deadline) if asked else None

    def _key(self, rank: int) -> str:
        return f"answer/{self._round}/{rank}"
