"""The nodes of one attempt that a scheduler gives, from their start to their end."""

import threading
from types import TracebackType

from midstride.engine.launch.schedulers.base import Scheduler

__all__ = ["NodeJobs"]

#: between two questions to the scheduler
_EVERY_S = 5.0


class NodeJobs:
    """Starts the nodes at the begin of a `with` block, and ends them with it.

    Args:
        scheduler: gives the nodes; None where they come by themselves.
        address: HOST:PORT of the launcher.

    Raises:
        JobError: on entering: it was refused.
        WorldError: on entering: the scheduler does not answer.
    """

    def __init__(self, scheduler: Scheduler | None, address: str) -> None:
        self._scheduler, self._address = scheduler, address
        self._end_reason = ""
        self._over = threading.Event()

    def __enter__(self) -> "NodeJobs":
        """Start them."""
        if self._scheduler is not None:
            print(self._scheduler.start(self._address), flush=True)
            # A thread: a scheduler that is slow to answer shall not keep the launcher from the nodes that it has.
            watch = threading.Thread(target=self._watch, args=(self._scheduler,), name="midstride-nodes", daemon=True)
            watch.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End them."""
        self.stop()

    def end_reason(self) -> str:
        """Return why no node will come any more; "" while some may."""
        return self._end_reason

    def stop(self) -> None:
        """End all of them; again changes nothing."""
        if self._scheduler is None or self._over.is_set():
            return
        self._over.set()
        try:
            self._scheduler.stop()
        except Exception as error:  # they end by themselves: there is no launcher any more
            print(f"the nodes could not be ended, and do so by themselves: {error}", flush=True)

    def _watch(self, scheduler: Scheduler) -> None:
        while not self._over.wait(_EVERY_S):
            try:
                self._end_reason = scheduler.end_reason()
            except Exception as error:
                print(f"{scheduler.name} does not say how the nodes are: {error}", flush=True)
