"""Ranks of a job on one machine exchange no pickle before each has proved that it read the private file of the job."""

import os
import pickle
from pathlib import Path

import pytest
import torch
from support.attacker import Touch

from midstride.engine.errors import WorldError
from midstride.engine.processes.loopback import MEETING
from midstride.engine.strategies.torch_collective import TorchCollective
from midstride.engine.testing import run_ranks
from midstride.engine.world import World


def meet(folder: Path, intruder: int | None) -> None:
    """Meet as a rank, gather a value, and note what happened; an intruder has read another file."""
    world, collective = World.from_environment(), TorchCollective()
    os.environ[MEETING] = str(folder / "ranks")
    if world.rank == intruder:
        from midstride.engine.strategies import peers

        honest = peers._proof
        peers._proof = lambda key, *others: honest(b"another key", *others)
    try:
        collective.init_process_group(world, torch.device("cpu"))
        assert MEETING not in os.environ, "what a rank starts does not meet there"
        channel = collective.side_channel()
        value = Touch(str(folder / "owned")) if intruder is not None else world.rank
        said = f"{collective.gather(value)} {channel.gather(world.rank)} {collective.key_value_store() is not None}"
        channel.close()
    except WorldError as error:
        said = str(error)
    (folder / f"said-{world.rank}").write_text(said)
    os._exit(0)  # the others have ended, or are none


@pytest.mark.parametrize("intruder", [None, 1])
def test_an_intruder_among_the_ranks_is_named_before_a_pickle_is_read(intruder: int | None, tmp_path: Path) -> None:
    assert pickle.loads(pickle.dumps(Touch(str(tmp_path / "control")))) == 0
    assert (tmp_path / "control").exists()
    assert run_ranks(meet, tmp_path, intruder, processes=3) == [0, 0, 0]
    said = [(tmp_path / f"said-{rank}").read_text() for rank in range(3)]
    if intruder is None:
        assert said == ["[0, 1, 2] [0, 1, 2] True"] * 3
    else:
        for rank in (0, 2):
            assert (
                f"a process that is no rank of this run has connected to rank {rank} in place of rank 1" in said[rank]
            )
    assert not (tmp_path / "owned").exists()
