"""Where ranks meet: a machine that is not known by its name is named."""

import os
from unittest import mock

import pytest
from support.launched import at, in_step

from midstride.engine.errors import WorldError
from midstride.engine.strategies import rendezvous
from midstride.engine.world import World

NOWHERE = "gpu07.invalid"  # a domain that has no machines: RFC 2606

MEETINGS = {
    "torchrun": ({**at(1, 4, 2), "MASTER_ADDR": NOWHERE, "MASTER_PORT": "29500"}, "MASTER_ADDR"),
    "srun": (
        {**in_step(1, 4), "SLURM_STEP_NODELIST": NOWHERE, "SLURM_JOB_ID": "7"},
        "the first machine of Slurm's step",
    ),
}


@pytest.mark.parametrize("launcher", MEETINGS)
def test_a_machine_that_is_not_known_is_named(launcher: str, capsys: pytest.CaptureFixture[str]) -> None:
    environment, what = MEETINGS[launcher]
    words = rf"no address is known for {NOWHERE} \({what}\), where the ranks meet: .*; let that name resolve"
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(rendezvous, "_KNOWN_S", 0.2),
        pytest.raises(WorldError, match=words),
    ):
        rendezvous.rendezvous_store(World.from_environment(environment))
    assert capsys.readouterr().err.count(f"no address is known for {NOWHERE}") == 1
