"""The world a process belongs to: read from the environment once, then handed on whole."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from midstride.engine.errors import JobError
from midstride.engine.slurm import local_tasks, step_tasks

__all__ = ["World"]


@dataclass(frozen=True)
class World:
    """Place of this process among the processes that train together.

    Args:
        rank: this process, 0 <= rank < size.
        size: processes in the world.
        local_rank: this process on its node.
        local_size: processes on this node.
        node: this node, from 0.
        launcher: what started this process as a rank; None if nothing did.
    """

    #: environment variable in which a Trainer that starts ranks says so
    STARTED: ClassVar[str] = "MIDSTRIDE_STARTED"
    #: that in which a rank on one of several nodes finds the number of the round that it belongs to
    ROUND: ClassVar[str] = "MIDSTRIDE_ROUND"
    #: that in which the ranks of one machine find the file in which they meet
    MEETING: ClassVar[str] = "MIDSTRIDE_MEETING"

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    launcher: str | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, the one that speaks for all."""
        return self.rank == 0

    @property
    def nodes(self) -> int:
        """Number of nodes, each with as many processes as this one."""
        return self.size // self.local_size

    @property
    def environment(self) -> dict[str, str]:
        """The variables that describe this rank, as torchrun writes it."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "GROUP_RANK": str(self.node),
        }

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "World":
        """Return the world that a launcher described in `environment`; alone if none did.

        Raises:
            JobError: its numbers describe no world.

        >>> World.from_environment({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}).node
        1
        """
        described = (name for name, of in _LAUNCHERS.items() if of[0] in environment and of[1] in environment)
        launcher = next(described, None)
        if launcher in (None, "mpiexec") and "MPI_LOCALRANKID" not in environment and step_tasks(environment) > 1:
            return cls._of_step(environment)  # with --mpi=pmi2, srun writes what mpiexec does, and not all of it
        if launcher is None:
            return cls()
        if faults := _faults(environment, _LAUNCHERS[launcher]):
            raise JobError.of("the environment that tells this process which rank it is", faults)
        rank_in, size_in, local_rank_in, local_size_in = _LAUNCHERS[launcher]
        rank, size = int(environment[rank_in]), int(environment[size_in])
        local_size = int(environment.get(local_size_in, str(size)))
        started = launcher == "torchrun" and cls.STARTED in environment
        return cls(
            rank=rank,
            size=size,
            local_rank=int(environment.get(local_rank_in, str(rank % local_size))),
            local_size=local_size,
            node=int(environment.get("GROUP_RANK", str(rank // local_size))),
            launcher="midstride" if started else launcher,
        )

    @classmethod
    def _of_step(cls, environment: Mapping[str, str]) -> "World":
        """The world of the tasks that `srun` started."""
        return cls(
            rank=int(environment["SLURM_PROCID"]),
            size=step_tasks(environment),
            local_rank=int(environment["SLURM_LOCALID"]),
            local_size=local_tasks(environment),
            node=int(environment.get("SLURM_NODEID", "0")),
            launcher="srun",
        )


def _faults(environment: Mapping[str, str], names: tuple[str, str, str, str]) -> list[str]:
    """Return messages on faults of rank, size and their local variants under `names`."""
    given = {name: environment[name] for name in names if name in environment}
    least = dict(zip(names, (0, 1, 0, 1), strict=True))
    faults = [
        f"{name} is {text!r}: a whole number from {least[name]} on is needed"
        for name, text in given.items()
        if not text.isdecimal() or int(text) < least[name]
    ]
    if faults:
        return faults
    number = {name: int(text) for name, text in given.items()}
    rank, size, local_rank, local_size = names
    counted = {rank: size, local_rank: local_size if local_size in number else size}
    faults = [
        f"{one} is {number[one]}, and {count} is {number[count]}: ranks count from 0"
        for one, count in counted.items()
        if one in number and number[one] >= number[count]
    ]
    if number.get(local_size, 1) > number[size]:
        faults.append(f"{local_size}, processes on this machine, is {number[local_size]}, and {size} is {number[size]}")
    return faults


#: launcher -> where it writes rank, size, local rank and local size
_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "horovodrun": ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    "mpirun": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "mpiexec": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
