"""Step of Slurm: variables that `srun` sets for each of its tasks. Needs no torch.

A batch script and what it runs without srun are no tasks of a step, though some variables are there as well.
"""

import re
from collections.abc import Mapping

__all__ = ["is_one_task", "local_tasks", "meeting_point", "step_tasks"]

#: below the ports that Linux gives to clients, 32768 and above
_FIRST_PORT, _PORTS = 20_000, 12_000


def step_tasks(environment: Mapping[str, str]) -> int:
    """Return how many tasks the step has that this process is one of; 0 if it is in none."""
    if "SLURM_STEP_ID" not in environment or "SLURM_PROCID" not in environment:
        return 0
    return int(environment.get("SLURM_STEP_NUM_TASKS", "1"))


def is_one_task(environment: Mapping[str, str]) -> bool:
    """Return whether this is the only task of a step, and no interactive shell."""
    return step_tasks(environment) == 1 and "SLURM_PTY_PORT" not in environment


def local_tasks(environment: Mapping[str, str]) -> int:
    """Return how many tasks of the step are on this machine.

    >>> local_tasks({"SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "3"})
    1
    """
    counts: list[int] = []
    for group in environment["SLURM_STEP_TASKS_PER_NODE"].split(","):
        tasks, _, times = group.partition("(x")
        counts += [int(tasks)] * int(times.rstrip(")") or 1)
    return counts[int(environment.get("SLURM_NODEID", "0"))]


def meeting_point(environment: Mapping[str, str]) -> tuple[str, int, str]:
    """Return the machine of the step's first task, a port there, and the step's unique name.

    >>> meeting_point({"SLURM_STEP_NODELIST": "gpu[07-09,12],big1", "SLURM_JOB_ID": "41", "SLURM_STEP_ID": "2"})
    ('gpu07', 20658, 'slurm/41.2.0')
    """
    job, step = environment.get("SLURM_JOB_ID", "0"), environment["SLURM_STEP_ID"]
    restarts = environment.get("SLURM_RESTART_COUNT", "0")
    port = _FIRST_PORT + (16 * int(job) + int(step) + int(restarts)) % _PORTS
    return _first_host(environment["SLURM_STEP_NODELIST"]), port, f"slurm/{job}.{step}.{restarts}"


def _first_host(nodes: str) -> str:
    """Return the first of a list of hosts as Slurm abbreviates it."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", nodes)
    if match is None:
        raise ValueError(f"SLURM_STEP_NODELIST={nodes!r} names no machine")
    return "".join(text or "" for text in match.groups())
