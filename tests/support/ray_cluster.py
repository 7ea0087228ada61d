"""A real Ray of one head and three machines on this one: `python -m support.ray_cluster`, told what to do by lines.

It says its address and the machines' first processes as JSON; `remove 2` loses the third; it ends with its input.
"""

import json
import sys

from ray.cluster_utils import Cluster

__all__ = ["main"]


def main() -> None:
    """Be the cluster."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    machines = [cluster.add_node(num_cpus=1, resources={"machine": 1}) for _ in range(3)]
    first = [machine.all_processes["raylet"][0].process.pid for machine in machines]
    print(json.dumps({"address": cluster.address, "machines": first}), flush=True)
    for line in sys.stdin:
        cluster.remove_node(machines[int(line.split()[1])], allow_graceful=False)
    cluster.shutdown()


if __name__ == "__main__":
    main()
