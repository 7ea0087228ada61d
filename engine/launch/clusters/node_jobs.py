"""The nodes of one attempt that a cluster gives, from their start to their end."""

import threading
from types import TracebackType

from midstride.engine.launch.clusters.base import Cluster

__all__ = ["NodeJobs"]

#: between two questions to the cluster
_EVERY_S = 5.0


class NodeJobs:
    """Starts the nodes at the begin of a `with` block, and ends them with it.

    Args:
        cluster: gives the nodes; None where they come by themselves.
        address: HOST:PORT of the launcher.
        secret: of the run.

    Raises:
        JobError: on entering: it was refused.
        WorldError: on entering: the cluster does not answer.
    """

    def __init__(self, cluster: Cluster | None, address: str, secret: str) -> None:
        self._cluster, self._address, self._secret = cluster, address, secret
        self._end_reason = ""
        self._over = threading.Event()

    def __enter__(self) -> "NodeJobs":
        """Start them."""
        if self._cluster is not None:
            print(self._cluster.start(self._address, self._secret), flush=True)
            # A thread: a cluster that is slow to answer shall not keep the launcher from the nodes that it has.
            watch = threading.Thread(target=self._watch, args=(self._cluster,), name="midstride-nodes", daemon=True)
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
        if self._cluster is None or self._over.is_set():
            return
        self._over.set()
        try:
            self._cluster.stop()
        except Exception as error:  # they end by themselves: there is no launcher any more
            print(f"the nodes could not be ended, and do so by themselves: {error}", flush=True)

    def _watch(self, cluster: Cluster) -> None:
        while not self._over.wait(_EVERY_S):
            try:
                self._end_reason = cluster.end_reason()
            except Exception as error:
                print(f"{cluster.name} does not say how the nodes are: {error}", flush=True)
