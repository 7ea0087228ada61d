"""A script with a loop of its own, as a flow: killed, failed and retried, it ends with the undisturbed bits."""

from pathlib import Path

from prefect import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from support.flow_runs import results, train_forked, wait_for

from midstride.engine.config.job import TrainingJob
from midstride.engine.runs.run import Run
from midstride.flows.train import train

SCRIPT = """
import os, signal, sys
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from midstride.engine import Loop

def strikes(name, times):
    path = Path(sys.argv[1], f"{name}-{loop.rank}")
    count = len(path.read_text()) if path.exists() else 0
    if sys.argv[1] == "never" or count == times:
        return False
    path.write_text("x" * (count + 1))
    return True

loop = Loop()
model = loop.ddp(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
loop.keep(model=model, optimizer=optimizer)
drawn = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))
train = loop.loader(DataLoader(TensorDataset(drawn, drawn.sum(1, keepdim=True)), 4, shuffle=True))
loop.state.step, loop.state.best = 0, float("inf")
for epoch in loop.epochs(3):
    for x, y in train:
        loss = (model(x) - y).square().mean()
        loss.backward()
        if loop.state.step == 4 and loop.rank == 1 and strikes("kill", 1):
            os.kill(os.getpid(), signal.SIGKILL)
        if loop.state.step == 9 and loop.rank == 0 and strikes("error", 2):  # one counts: the other may lose it first
            raise RuntimeError("not in the mood")
        optimizer.step()
        optimizer.zero_grad()
        loop.log("train/loss", loss, sync_dist=True)
        loop.state.step += 1
    with torch.no_grad():
        held = (model(drawn) - drawn.sum(1, keepdim=True)).square().mean().item()
    loop.log("val/loss", held)
    if held < loop.state.best:
        loop.state.best = held
        loop.save_weights("best")
"""
JOB = """
name: scripted
script: train.py
args: [./strikes]
seed: 5
world: {processes: 2, launcher: spawn, accelerator: cpu}
snapshots: {url: runs, every_steps: 2}
monitor: {metric: val/loss}
"""


def test_a_script_is_killed_and_retried_without_a_bit_lost(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "strikes").mkdir()
    job = TrainingJob.load(tmp_path / "job.yaml")
    calm = job.model_copy(update={"args": ("never",)})
    train_forked(calm, "calm")
    state = train.with_options(retries=1)(job, "struck", return_state=True)
    report = state.result()
    tried = Run(job, "struck").attempts.attempts()
    # A kill, an error, and the same one again: it ends the flow, which Prefect retries.
    assert [attempt.outcome for attempt in tried] == ["died", "died", "died", "done"]
    assert tried[-1].resumed_step in (6, 8)
    assert (report.steps, report.epochs) == (18, 3)
    assert results(job, "struck") == results(calm, "calm")
    assert report.best["val/loss"] > 0
    for what in ("report", "curves", "best weights", "metric log"):
        assert Path(report.files[what]).exists(), what
    wait_for(lambda: "snapshot at step" in _tasks(state.state_details.flow_run_id), "a task for a snapshot")


def _tasks(flow_run: object) -> str:
    with get_client(sync_client=True) as client:
        runs = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run])))
    return " ".join(run.name for run in runs)
