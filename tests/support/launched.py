"""Environments in which launchers start ranks."""

from midstride.engine.world import World


def at(rank: int, size: int, local_size: int, launcher: str = "torchrun") -> dict[str, str]:
    """The environment of one rank."""
    world = World(rank=rank, size=size, local_rank=rank % local_size, local_size=local_size, node=rank // local_size)
    return world.environment


def in_step(rank: int, tasks: int, **more: str) -> dict[str, str]:
    """The environment of one task of a Slurm step, two on each machine."""
    ids = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank % 2, "SLURM_NODEID": rank // 2, "SLURM_STEP_NUM_TASKS": tasks}
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": "2(x2)" if tasks == 4 else str(tasks)}
    return {**{name: str(value) for name, value in ids.items()}, **step, **more}
