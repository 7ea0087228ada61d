"""Clusters: start `midstride join` on the machines of a cluster, and end it.

base       base class of clusters, and the nodes that one gives to an attempt
build      clusters by name: nothing is imported until its name is asked for
kubernetes  an Indexed Job of nodes, owned by the launcher's pod
ray_tasks  Ray: a task a node
slurm      Slurm, by sbatch, squeue and scancel
"""
