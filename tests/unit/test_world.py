"""The world of a rank, from the environment in which its launcher started it."""

import pytest
from support.launched import at, in_step

from midstride.engine.world import World


@pytest.mark.parametrize(
    ("environment", "launcher"),
    [
        (at(1, 4, 2), "torchrun"),
        (
            {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2"},
            "horovodrun",
        ),
        (
            {
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "4",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            },
            "mpirun",
        ),
        (in_step(1, 4), "srun"),
        ({**in_step(1, 4), "PMI_RANK": "1", "PMI_SIZE": "4"}, "srun"),
    ],
)
def test_a_world_is_found_whoever_started_it(environment: dict[str, str], launcher: str) -> None:
    found = World.from_environment(environment)
    assert found == World(rank=1, size=4, local_rank=1, local_size=2, node=0, launcher=launcher)
    assert found.nodes == 2
