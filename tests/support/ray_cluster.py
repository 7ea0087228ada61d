"""A real Ray of one head and two machines on this one: `python -m support.ray_cluster`, told what to do by lines.

It says its address and the machines' first processes as JSON; `remove 1` loses the second, `add` is one more and says
its first process; it ends with its input.
"""

import json
import sys
from typing import Any

from ray.cluster_utils import Cluster

_MACHINE: dict[str, Any] = {"num_cpus": 1, "resources": {"machine": 1}}


def main() -> None:
    """Be the cluster."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    machines = [cluster.add_node(**_MACHINE) for _ in range(2)]
    print(json.dumps({"address": cluster.address, "machines": [*map(_first_process, machines)]}), flush=True)
    for line in sys.stdin:
        if line.startswith("add"):
            machines.append(cluster.add_node(**_MACHINE))
            print(json.dumps(_first_process(machines[-1])), flush=True)
        else:
            cluster.remove_node(machines[int(line.split()[1])], allow_graceful=False)
    cluster.shutdown()


def _first_process(machine: Any) -> int:
    pid: int = machine.all_processes["raylet"][0].process.pid
    return pid


if __name__ == "__main__":
    main()
