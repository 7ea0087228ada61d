"""Other users of the machine or the network: what they try has no effect, and a control shows that they can."""

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support.attacker import attack, listening_ports, open_meetings, start_attack
from support.flow_runs import results, tiny_job, wait_for
from support.limit import LIMIT_S
from support.machines import Machines, undisturbed
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend

from midstride.engine.processes.lifetime import descendants, signal_all
from midstride.engine.runs.audit import audit
from midstride.engine.runs.run import Run
from midstride.engine.runs.run_report import report_of
from midstride.engine.strategies.rendezvous import serve_store

#: 127.0.0.1, as /proc/net/tcp has it
LOOPBACK = "0100007F"


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    """Machines that end with the test."""
    found = Machines(tmp_path)
    yield found
    found.close()


@pytest.fixture
def marker() -> Iterator[Path]:
    """A file that an attacker can make."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        yield Path(folder) / "owned"


def test_an_attacker_at_the_port_changes_and_learns_nothing(machines: Machines, marker: Path, tmp_path: Path) -> None:
    open_store = serve_store()
    open_store.set("job", json.dumps({"job": {"module": "model:Net"}}))
    job = tiny_job(tmp_path)
    machines.fit(nodes=2)
    port = int(machines.address.rpartition(":")[2])
    ports = listening_ports(machines.launcher.process.pid)
    assert port in ports
    assert {*ports.values()} == {LOOPBACK}, "where the job says that nodes meet"
    secret = Path(machines.secret_file).read_text()
    rewritten = attack("rewrite_job", marker, open_store.port, *ports).split()
    assert json.loads(open_store.get("job"))["job"]["module"] == "os:system", "the attacker's program works"
    assert str(port) not in rewritten, "other stores, in which ranks meet, hold no job"
    assert "failed: SecretRefused" in attack("guess_secret", port)
    for _ in range(2):
        machines.join()
    machines.wait_for_round(ranks=2)
    processes = subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True, check=True).stdout
    assert machines.secret_file in processes, "a node's command names the file"
    sessions = [*Path(tempfile.gettempdir()).glob("midstride-*")]
    assert sessions
    told = [found for found in (*sessions, tmp_path) if holds(found, secret)]
    assert machines.launcher.wait() == 0, machines.said()
    assert [node.wait() for node in machines.nodes] == [0, 0], machines.said()
    assert not marker.exists()
    assert results(job, "a") == undisturbed(tmp_path / "undisturbed", 24)
    assert audit(job.run_url("a")).is_clean
    said = machines.said("fit.txt")
    assert "a connection from 127.0.0.1 was refused: it does not know the run's secret" in said
    everything = [processes, machines.said(), str(report_of(Run(job, "a")))]
    assert not told
    assert not holds(tmp_path, secret)
    assert [text for text in everything if secret in text] == []


def holds(folder: Path, secret: str) -> bool:
    """Whether any file below `folder` contains the secret."""
    for place, _, names in os.walk(folder):
        for path in (Path(place, name) for name in names):
            with suppress(FileNotFoundError):  # files of a run come and go
                if path.is_file() and secret.encode() in path.read_bytes():
                    return True
    return False


def test_a_node_follows_no_launcher_without_its_secret(machines: Machines, marker: Path, tmp_path: Path) -> None:
    tiny_job(tmp_path)
    machines.fit(nodes=2)
    port = machines.address.rpartition(":")[2]
    machines.launcher.kill()
    machines.launcher.wait()
    impostor = start_attack("be_launcher", port, marker)
    try:
        assert impostor.stdout is not None
        assert impostor.stdout.readline() == "listens\n"
        node = machines.join()
        assert node.wait() == 2
        assert f"the program at 127.0.0.1:{port} refuses this secret" in machines.said("node-1.txt")
        assert Path(machines.secret_file).read_text() not in machines.said()
        assert not marker.exists()
    finally:
        impostor.kill()
        impostor.communicate()


def test_a_node_with_a_wrong_secret_is_refused(machines: Machines, tmp_path: Path) -> None:
    tiny_job(tmp_path)
    machines.fit(nodes=2)
    wrong = tmp_path / "wrong"
    wrong.touch(0o600)
    wrong.write_text("a" * 64)
    right, machines.secret_file = machines.secret_file, str(wrong)
    assert machines.join().wait() == 2
    words = "refuses this secret: use the secret file that this launcher has printed"
    said = wait_for(lambda: words in machines.said("node-1.txt") and machines.said(), "the words of the node")
    assert "a" * 64 not in said
    assert Path(right).read_text() not in said


SCRIPT = """
import sys
from midstride.engine import Trainer
from midstride.engine.seeds import seed_everything

if __name__ == "__main__":
    seed_everything(3)
    from model import Data, Net
    folder, strategy = sys.argv[1:]
    module, data = Net(mark=f"{folder}/mark", lingers=f"{folder}/slow"), Data(f"{folder}/data")
    trainer = Trainer(strategy=strategy, devices=2, max_steps=200, enable_progress_bar=False)
    trainer.fit(module, data, run=f"{folder}/runs/a")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
@pytest.mark.parametrize("started", ["torchrun", "spawn", "ddp", "ddp_spawn", "ddp_fork"])
def test_on_one_machine_another_user_reaches_no_store(started: str, marker: Path, tmp_path: Path) -> None:
    is_script = started.startswith("ddp")
    tiny_job(tmp_path, launcher="" if is_script else started, steps=200, lingers=f"{tmp_path}/slow")
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "slow").touch()
    command = ["-m", "midstride.engine", "fit", "job.yaml", "--run", "a"]
    command = [sys.executable, *(["script.py", str(tmp_path), started] if is_script else command)]
    with (tmp_path / "fit.txt").open("wb") as out:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=out, stderr=subprocess.STDOUT)
    try:
        wait_for(lambda: (tmp_path / "mark").exists() or process.poll() is not None, "a step")
        assert process.poll() is None, (tmp_path / "fit.txt").read_text()
        ports = listening_ports(process.pid)
        assert {*ports.values()} == {LOOPBACK}, "gloo"
        assert attack("poison_rendezvous", marker, *ports) == "none"
        assert attack("open_meetings") == "0"
        assert int(open_meetings()) > 0, "the control: this user's processes can"
        (tmp_path / "slow").unlink()
        assert process.wait(LIMIT_S) == 0, (tmp_path / "fit.txt").read_text()
    finally:
        signal_all([*descendants(process.pid), process.pid])
        process.wait()
    assert not marker.exists()


def test_the_agent_of_torchrun_reads_a_pickle_at_a_port(marker: Path) -> None:
    """The control: what is given to a rendezvous at a port is executed."""
    store = serve_store()
    assert attack("poison_rendezvous", marker, store.port) == str(store.port)
    parameters = RendezvousParameters("c10d", f"127.0.0.1:{store.port}", "control", 1, 1, is_host=False)
    backend, _ = create_backend(parameters)
    backend_state = backend.get_state()
    assert backend_state is not None
    pickle.loads(backend_state[0])  # as the agent does
    assert marker.exists()
