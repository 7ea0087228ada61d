"""What a world of one machine listens on: the loopback alone, by whatever its ranks are started."""

import ipaddress
import os
from pathlib import Path

import pytest
from laws.horovod_world import needs_horovod
from support.flow_runs import tiny_job, wait_for
from support.fork_server import start_program
from support.limit import LIMIT_S

from midstride.engine.config.job import TrainingJob
from midstride.engine.launch.launch import launch
from midstride.engine.processes.lifetime import descendants
from midstride.engine.runs.run import Run
from midstride.engine.session.events import Event

LISTENING = "0A"

SCRIPT = """
import sys, time
from pathlib import Path
import torch
from torch.utils.data import DataLoader, TensorDataset
from midstride.engine import Trainer, TrainingModule

class Line(TrainingModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        if self.global_step == 1:
            Path(sys.argv[1], f"up-{self.trainer.world.rank}").touch()
            while not Path(sys.argv[1], "seen").exists():
                time.sleep(0.02)
        return self.layer(batch[0]).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

if __name__ == "__main__":
    data = DataLoader(TensorDataset(torch.ones(8, 1)), 2)
    Trainer(strategy=sys.argv[2], devices=2).fit(Line(), data, run=f"{sys.argv[1]}/run")
"""


def listens(pids: list[int]) -> set[str]:
    """Return the addresses at which processes accept connections over TCP."""
    inodes = set()
    for pid in pids:
        try:
            links = [str(handle.readlink()) for handle in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue  # it has ended
        inodes |= {link.removeprefix("socket:[").rstrip("]") for link in links if link.startswith("socket:[")}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == LISTENING and inode in inodes:
                address = bytes.fromhex(local.partition(":")[0])
                words = b"".join(address[at : at + 4][::-1] for at in range(0, len(address), 4))
                found.add(str(ipaddress.ip_address(words)))
    return found


def is_private(address: str) -> bool:
    known = ipaddress.ip_address(address)
    return (getattr(known, "ipv4_mapped", None) or known).is_loopback


@pytest.mark.parametrize("launcher", ["spawn", "torchrun", pytest.param("horovodrun", marks=needs_horovod)])
@pytest.mark.usefixtures("forked_worlds")
def test_a_launched_world_listens_on_the_loopback_alone(tmp_path: Path, launcher: str) -> None:
    job = tiny_job(tmp_path, slow_rank=1)
    strategy = "horovod" if launcher == "horovodrun" else "ddp"
    job = TrainingJob.load(tmp_path / "job.yaml", [f"world.launcher={launcher}", f"world.strategy={strategy}"])
    addresses: set[str] = set()

    def look(event: Event) -> None:
        addresses.update(listens(descendants(os.getpid())))

    assert launch(Run(job, "night"), on_event=look).kind == "done"
    assert addresses
    assert all(map(is_private, addresses)), addresses


@pytest.mark.parametrize("strategy", ["ddp"])
def test_the_world_of_a_script_listens_on_the_loopback_alone(tmp_path: Path, strategy: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    script = start_program(tmp_path / "script.py", tmp_path / "log.txt", str(tmp_path), strategy)
    try:
        wait_for(lambda: len([*tmp_path.glob("up-*")]) == 2 or script.poll() is not None, "both ranks")
        addresses = listens([script.pid, *descendants(script.pid)])
        (tmp_path / "seen").touch()
        assert script.wait(LIMIT_S) == 0, (tmp_path / "log.txt").read_text()
    finally:
        script.kill()
    assert addresses
    assert all(map(is_private, addresses)), addresses
