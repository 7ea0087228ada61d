"""Clusters by name: nothing is imported until its name is asked for."""

from midstride.engine.config.clusters import CLUSTERS
from midstride.engine.config.import_paths import load_attribute
from midstride.engine.launch.clusters.base import Cluster, NodeRequest
from midstride.engine.runs.run import Run

__all__ = ["build_cluster"]


def build_cluster(run: Run, grace_s: float) -> Cluster | None:
    """Return the cluster that the job names; None if its nodes come by themselves.

    Args:
        run: the run to train.
        grace_s: seconds that a node has to take a snapshot and leave.

    Raises:
        StrategyUnavailable: a package for it is not installed.
    """
    world = run.job.world
    if world.on not in CLUSTERS:
        return None
    kind = load_attribute(CLUSTERS[world.on].target, run.job.folder, "world.on")
    cluster: Cluster = kind(NodeRequest(run.name, run.url, world.machines, world.on_args, grace_s))
    return cluster
