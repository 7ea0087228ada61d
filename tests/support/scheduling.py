"""Which worker of pytest-xdist runs which tests."""

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

FLOWS = "tests/flows/"
#: files that share automations of the server, and so a worker
AUTOMATED = (f"{FLOWS}test_deployment.py", f"{FLOWS}test_self_hosted.py")


class Scheduling(LoadFileScheduling):
    """A file's tests run in one worker, which makes what they share once; most flows are dealt one by one.

    Flows wait more than they compute, so one worker runs them beside all else. Others join in when nothing else is
    left: where Prefect's threads have run, what is forked (workers, lives of a check) ends with code 1.
    """

    _of_flows: WorkerController | None = None

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        if file in AUTOMATED:
            return AUTOMATED[0]
        return nodeid if file.startswith(FLOWS) else file

    def schedule(self) -> None:
        if self.collection is None and len(self.nodes) > 1:
            self._of_flows = self.nodes[-1]
        super().schedule()

    def _assign_work_unit(self, node: WorkerController) -> None:
        flows = [scope for scope in self.workqueue if scope.startswith(FLOWS)]
        others = [scope for scope in self.workqueue if not scope.startswith(FLOWS)]
        if flows and (node is self._of_flows or not others):
            self.workqueue.move_to_end(AUTOMATED[0] if AUTOMATED[0] in flows else flows[0], last=False)
        elif node is self._of_flows and any(scope.startswith(FLOWS) for scope in self.assigned_work[node]):
            node.shutdown()
            return
        else:
            self.workqueue.move_to_end(others[0], last=False)
        super()._assign_work_unit(node)
