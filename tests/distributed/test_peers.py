"""Ranks of one machine read no pickle of another process before it has proved that it read their private file."""

import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.attacker import Touch

from midstride.engine.errors import WorldError
from midstride.engine.strategies import peers, rendezvous
from midstride.engine.strategies.torch_collective import TorchCollective
from midstride.engine.testing import run_ranks
from midstride.engine.world import World

INTRUDER = 1


def be_intruder() -> None:
    """Connect as a rank does, without its key; where it would look at the keys of others, it has done what it can."""
    honest = peers._proof
    peers._proof = lambda _, *ranks: honest(b"another key", *ranks)
    peers._verify = lambda *_: os._exit(0)


def meet(folder: Path, case: str, at: str) -> None:
    """Meet as a rank, exchange values in all kinds of groups, and write down what happened."""
    world, collective = World.from_environment(), TorchCollective()
    if case == "unchecked":
        rendezvous.check_peers = lambda *_: None
    if at == "with TORCH_DISTRIBUTED_DEBUG":
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    if at == "another group":
        collective.init_process_group(world, torch.device("cpu"))
    if case != "honest" and world.rank == INTRUDER:
        be_intruder()
    value = Touch(str(folder / "owned")) if case != "honest" else world.rank
    try:
        if at == "a group of the user's":
            dist.init_process_group("gloo")
        collective.init_process_group(world, torch.device("cpu"))
        channel, group = collective.side_channel(), dist.new_group([0, 1, 2])
        said: list[object] = [None] * 3
        dist.all_gather_object(said, value, group=group)
        said += [*collective.gather(value), *channel.gather(value)]
        values = collective.key_value_store()
        values.set(f"{world.rank}", "here")
        values.clone().wait([f"{rank}" for rank in range(3)])
        words = repr(said)
    except WorldError as error:
        words = str(error)
    (folder / f"said-{world.rank}").write_text(words)
    os._exit(0)  # the others have ended, or are none


PLACES = ("the first group", "another group", "a group of the user's", "with TORCH_DISTRIBUTED_DEBUG")


@pytest.mark.parametrize("at", PLACES)
@pytest.mark.parametrize("case", ["honest", "unchecked", "checked"])
def test_no_pickle_of_an_intruder_is_read(case: str, at: str, tmp_path: Path) -> None:
    """The control has no check: what the intruder sends is executed."""
    assert run_ranks(meet, tmp_path, case, at, processes=3) == [0, 0, 0]
    said = [path.read_text() if path.exists() else "" for path in (tmp_path / f"said-{rank}" for rank in range(3))]
    assert (tmp_path / "owned").exists() == (case == "unchecked"), said
    if case == "honest":
        assert said == [repr([0, 1, 2] * 3)] * 3
    if case == "checked":
        for rank in (0, 2):
            words = f"a foreign process has connected to rank {rank} of a group in place of rank {INTRUDER}"
            assert words in said[rank]


def test_the_pickle_works(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Touch(str(tmp_path / "owned"))))
    assert (tmp_path / "owned").exists()
