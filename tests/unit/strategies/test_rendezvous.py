"""Where ranks meet: in a private file of one machine, or at another machine, which is named if nothing knows it."""

import fcntl
import json
import os
import re
import signal
import socket
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import BinaryIO
from unittest import mock

import pytest
import torch
from support.flow_runs import wait_for
from support.launched import at, in_step

from midstride.engine.errors import EngineError, JobError, StopSignal, WorldError
from midstride.engine.processes.loopback import ADDRESS
from midstride.engine.processes.process_identity import local_world_id, process_identity
from midstride.engine.processes.signal_handlers import signal_handlers
from midstride.engine.session.private_file import AnonymousFile, open_own, own_folder
from midstride.engine.strategies import rendezvous, torch_collective
from midstride.engine.strategies.torch_collective import TorchCollective
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
    words = rf"no address is known for {NOWHERE} \({what}\), where the ranks meet: .*; make that name resolve"
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(rendezvous, "_KNOWN_S", 0.2),
        pytest.raises(WorldError, match=words),
    ):
        rendezvous.rendezvous_store(World.from_environment(environment))
    assert capsys.readouterr().err.count(f"no address is known for {NOWHERE}") == 1


@pytest.mark.parametrize(
    ("port", "error", "words"),
    [
        ("abc", JobError, "MASTER_PORT is 'abc': a free port"),
        ("65536", JobError, "MASTER_PORT is '65536': a free port"),
        ("", WorldError, "rank 0 cannot listen at port [0-9]+: Address already in use; .* another MASTER_PORT"),
    ],
    ids=["a word", "too large", "taken"],
)
def test_a_port_that_rank_0_cannot_listen_at_is_named(port: str, error: type[EngineError], words: str) -> None:
    with socket.create_server((ADDRESS, 0)) as other:
        port = port or str(other.getsockname()[1])
        environment = {**at(0, 2, 2), "MASTER_ADDR": ADDRESS, "MASTER_PORT": port}
        with mock.patch.dict(os.environ, environment), pytest.raises(error, match=words):
            TorchCollective().init_process_group(World.from_environment(environment), torch.device("cpu"))


#: of each rank: what it prints while it waits, and its error in the end
WAITS = [
    ("rank 0 of 3 waits for ranks 1, 2, not connected yet; for [0-9]+ s more", "waited 0 s for ranks 1, 2: see their"),
    (
        "rank 1 of 3 waits for rank 0, which has not written yet into .*; for [0-9]+ s",
        "rank 0 did not write its address into",
    ),
]

#: launcher -> the variables of a rank of three on this machine, but its own number
LOCAL = {
    "mpirun": {"OMPI_COMM_WORLD_RANK": None, "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"},
    "horovodrun": {
        "HOROVOD_RANK": None,
        "HOROVOD_SIZE": "3",
        "HOROVOD_LOCAL_SIZE": "3",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": "41",
    },
}


def of_rank(rank: int, launcher: str) -> dict[str, str]:
    found = {name: value or str(rank) for name, value in LOCAL[launcher].items()}
    return {**found, next(iter(found)).replace("RANK", "LOCAL_RANK"): str(rank)}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this user's short-lived files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return own_folder()


@pytest.mark.parametrize("first", [0, 2], ids=["rank 0 first", "rank 0 last"])
@pytest.mark.parametrize("launcher", LOCAL)
def test_ranks_meet_in_a_file_despite_a_killed_world(launcher: str, first: int, folder: Path) -> None:
    stores = []  # kept until all are done: rank 0 holds the file

    def joined(rank: int) -> bytes:
        store = rendezvous.rendezvous_store(World.from_environment(of_rank(rank, launcher)))
        assert store is not None
        stores.append(store)
        store.set(f"joined/{rank}", str(rank))
        return b"".join(store.get(f"joined/{other}") for other in range(3))

    with mock.patch.dict(os.environ, of_rank(0, launcher)), ThreadPoolExecutor(3) as ranks:
        (folder / f"ranks-{local_world_id()}").write_text("/proc/9/fd/9")
        (folder / "ranks-of-another-world").write_text("/proc/9/fd/10")
        assert list(ranks.map(joined, sorted(range(3), key=lambda rank: (rank - first) % 3))) == [b"012"] * 3
    assert list(folder.iterdir()) == []


def test_the_file_of_another_world_whose_ranks_meet_now_stays(folder: Path) -> None:
    other = folder / "ranks-of-another-world"
    with other.open("w") as held, ThreadPoolExecutor(2) as ranks:
        fcntl.flock(held, fcntl.LOCK_EX)
        worlds = [World(rank=rank, size=2, local_rank=rank, local_size=2) for rank in range(2)]
        assert all(ranks.map(lambda world: rendezvous._local_store(world, folder / "mine"), worlds))
    assert list(folder.iterdir()) == [other]


def test_what_a_killed_world_has_left_is_no_address(folder: Path) -> None:
    """Rank 0 has the lock before it empties the file."""
    path, looks = folder / "mine", list[Path]()
    path.write_text(json.dumps({"path": "/proc/9/fd/9", "by": {**process_identity(), "began": -1}}))

    def look(at: Path) -> BinaryIO:
        looks.append(at)
        return open_own(at)

    first, other = (World(rank=rank, size=2, local_rank=rank, local_size=2) for rank in range(2))
    with mock.patch.object(rendezvous, "open_own", look), ThreadPoolExecutor() as ranks, path.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        joins = ranks.submit(rendezvous._local_store, other, path)
        wait_for(lambda: len(looks) > 2 or joins.done(), "rank 1 to look")
        assert not joins.done(), joins.exception()
        held.close()
        assert rendezvous._local_store(first, path)
        assert joins.result()


@pytest.mark.parametrize("rank", range(2))
def test_a_rank_that_waits_in_vain_says_so_and_ends(
    rank: int, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module, (printed, error) = TorchCollective(), WAITS[rank]
    with mock.patch.multiple(rendezvous, _SILENT_S=0.05, _CONNECTED_S=0.2), pytest.raises(WorldError, match=error):
        module.init_process_group(World.from_environment(of_rank(rank, "mpirun")), torch.device("cpu"))
    assert len(re.findall(printed, capsys.readouterr().err)) == 1
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    "environment",
    [at(0, 2, 2), of_rank(0, "mpirun"), of_rank(1, "mpirun")],
    ids=["started by torchrun", "started by mpirun", "rank 1 started by mpirun"],
)
def test_a_signal_interrupts_the_wait_for_a_rank_that_never_comes(
    environment: dict[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, meeting = World.from_environment(environment), rendezvous.Meeting(AnonymousFile())
    asked_at = list[float]()

    def stop(number: int, frame: FrameType | None) -> None:
        raise StopSignal("asked to stop")

    def ask() -> None:
        asked_at.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGUSR2)

    monkeypatch.setattr(torch_collective, "TIMEOUT", timedelta(seconds=10))
    monkeypatch.setattr(rendezvous.Meeting, "_named", meeting)
    if not world.is_first:
        monkeypatch.setattr(rendezvous, "_read_path", lambda world, path: meeting._path)
    threading.Timer(0.3, ask).start()
    with mock.patch.dict(os.environ, environment), signal_handlers({signal.SIGUSR2: stop}), pytest.raises(StopSignal):
        TorchCollective().init_process_group(world, torch.device("cpu"))
    assert time.monotonic() - asked_at[0] < 5
    assert list(folder.iterdir()) == []
