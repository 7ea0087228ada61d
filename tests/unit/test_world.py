"""The world of a rank, from the environment in which its launcher started it."""

import pytest
from support.launched import at, in_step

from midstride.engine.errors import JobError
from midstride.engine.world import World

SECOND_OF_FOUR = {"RANK": "1", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}


@pytest.mark.parametrize(
    ("environment", "launcher"),
    [
        (at(1, 4, 2), "torchrun"),
        ({f"HOROVOD_{name}": value for name, value in SECOND_OF_FOUR.items()}, "horovodrun"),
        ({f"OMPI_COMM_WORLD_{name}": value for name, value in SECOND_OF_FOUR.items()}, "mpirun"),
        (in_step(1, 4), "srun"),
        ({**in_step(1, 4), "PMI_RANK": "1", "PMI_SIZE": "4"}, "srun"),
    ],
)
def test_a_world_is_found_whoever_started_it(environment: dict[str, str], launcher: str) -> None:
    found = World.from_environment(environment)
    assert found == World(rank=1, size=4, local_rank=1, local_size=2, node=0, launcher=launcher)
    assert found.nodes == 2


OF_MPIRUN = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "0"}


@pytest.mark.parametrize(
    ("environment", "faults"),
    [
        ({**at(1, 2, 2), "RANK": "2"}, ["RANK is 2, and WORLD_SIZE is 2: ranks count from 0"]),
        ({**at(0, 2, 2), "RANK": "-1"}, ["RANK is '-1': a whole number from 0 on is needed"]),
        (
            {"RANK": "", "WORLD_SIZE": "two"},
            [
                "RANK is '': a whole number from 0 on is needed",
                "WORLD_SIZE is 'two': a whole number from 1 on is needed",
            ],
        ),
        (OF_MPIRUN, ["OMPI_COMM_WORLD_SIZE is '0': a whole number from 1 on is needed"]),
        ({**at(0, 2, 2), "LOCAL_WORLD_SIZE": "0"}, ["LOCAL_WORLD_SIZE is '0': a whole number from 1 on is needed"]),
        ({**at(0, 4, 2), "LOCAL_RANK": "2"}, ["LOCAL_RANK is 2, and LOCAL_WORLD_SIZE is 2: ranks count from 0"]),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "2"},
            ["LOCAL_RANK is 2, and WORLD_SIZE is 2: ranks count from 0"],
        ),
        (
            {**at(0, 2, 2), "LOCAL_WORLD_SIZE": "4"},
            ["LOCAL_WORLD_SIZE, processes on this machine, is 4, and WORLD_SIZE is 2"],
        ),
    ],
)
def test_numbers_that_describe_no_world_are_named(environment: dict[str, str], faults: list[str]) -> None:
    with pytest.raises(JobError) as caught:
        World.from_environment(environment)
    where = "the environment that tells this process which rank it is"
    assert str(caught.value) == str(JobError.of(where, faults))
