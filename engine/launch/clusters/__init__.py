"""Clusters: what starts `midstride join` on the machines of a cluster, and ends it.

base       what a cluster is: it starts nodes, says why none will come any more, and ends them
build      clusters by name: nothing is imported until its name is asked for
kubernetes  an Indexed Job of nodes, owned by the launcher's pod
node_jobs  the nodes of one attempt, from their start to their end
ray_tasks  Ray: a task a node
slurm      Slurm, by sbatch, squeue and scancel
"""
