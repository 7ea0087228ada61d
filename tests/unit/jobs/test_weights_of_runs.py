"""Predictions and exported weights of a run, and runs side by side."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyarrow import parquet
from safetensors.torch import load_file
from support.commands import run as run_command
from support.nets import Net
from torch.utils.data import DataLoader, TensorDataset

from midstride.engine import Trainer
from midstride.engine.config.job import TrainingJob
from midstride.engine.errors import JobError, UserError
from midstride.engine.jobs import evaluate
from midstride.engine.jobs.build import build_data, build_module, build_trainer
from midstride.engine.jobs.export_weights import export_weights
from midstride.engine.jobs.predict import columns_of, predict
from midstride.engine.runs.run import Run, run_at

MODEL = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from midstride.engine import DataModule, TrainingModule

class Data(DataModule):
    def __init__(self, rows=12):
        super().__init__()
        x = torch.arange(2.0 * rows).reshape(rows, 2)
        self.rows = TensorDataset(x, x.sum(dim=1, keepdim=True))

    def loader(self):
        return DataLoader(self.rows, batch_size=4)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = loader

class Saved(torch.nn.Linear):
    def save_pretrained(self, folder):
        torch.save(self.state_dict(), f"{folder}/linear.pt")

class Net(TrainingModule):
    def __init__(self, bias=True):
        super().__init__()
        self.linear = Saved(2, 1, bias=bias)

    def forward(self, x):
        return self.linear(x)

    def training_step(self, batch, batch_idx):
        loss = (self(batch[0]) - batch[1]).square().mean()
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", (self(batch[0]) - batch[1]).abs().mean())

    def test_step(self, batch, batch_idx):
        self.log("test/rows", float(len(batch[0])), reduce_fx="sum")

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return {"x": batch[0], "y": self(batch[0])[:, 0], "name": [f"row {int(x[0])}" for x in batch[0]]}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-4)
"""


def trained(folder: Path, run: str, **module_args: Any) -> Run:
    (folder / "model.py").write_text(MODEL)
    (folder / "job.yaml").write_text(
        f"{{name: sums, module: 'model:Net', module_args: {json.dumps(module_args)}, data: 'model:Data', "
        "trainer: {max_steps: 4, enable_progress_bar: false}, world: {accelerator: cpu}, "
        "snapshots: {url: runs, every_steps: 2}, monitor: {metric: val/loss}}"
    )
    this = Run(TrainingJob.load(folder / "job.yaml"), run)
    build_trainer(this.job).fit(build_module(this.job), build_data(this.job), run=this.url)
    this.save_job()
    return this


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return trained(tmp_path_factory.mktemp("project"), "first")


def weights(run: Run) -> Any:
    return build_module(run.job).load_from_checkpoint(f"{run.url}/best")


def test_predictions_are_rows_of_the_data(run: Run, tmp_path: Path) -> None:
    assert predict(run, str(tmp_path / "p.csv")) == {"rows": 12, "columns": ["x", "y", "name"]}
    predict(run, str(tmp_path / "p.npz"), "last")
    predict(run, str(tmp_path / "p.parquet"))
    arrays, table = np.load(tmp_path / "p.npz"), parquet.read_table(tmp_path / "p.parquet").to_pydict()
    with (tmp_path / "p.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert np.array_equal(arrays["x"], np.arange(24.0).reshape(12, 2))
    assert [row["name"] for row in rows] == table["name"] == [f"row {number}" for number in range(0, 24, 2)]
    assert [float(row["x_1"]) for row in rows] == table["x_1"] == list(np.arange(1.0, 24.0, 2))
    with torch.no_grad():
        assert torch.equal(weights(run)(torch.from_numpy(arrays["x"]))[:, 0], torch.tensor(table["y"]))


@pytest.mark.parametrize(
    ("batches", "columns"),
    [
        ([torch.ones(2), torch.zeros(1)], {"prediction": [1, 1, 0]}),
        ([(torch.ones(1), torch.zeros(1))], {"prediction_0": [1], "prediction_1": [0]}),
        ([["a", "b"], ["c"]], {"prediction": ["a", "b", "c"]}),
        ([3.0, 4.0], {"prediction": [3, 4]}),
        ([{"x": torch.ones(1, dtype=torch.bfloat16)}], {"x": [1]}),
        ([], {}),
    ],
)
def test_outputs_become_columns(batches: list[Any], columns: dict[str, list[Any]]) -> None:
    assert {name: array.tolist() for name, array in columns_of(batches).items()} == columns


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        ([{"x": torch.ones(1)}, {"y": torch.ones(1)}], "the same names"),
        ([{"x": torch.ones(1), "y": torch.ones(2)}], "1 of x, 2 of y"),
        ([object()], "a object for prediction"),
    ],
)
def test_outputs_that_are_no_columns_are_refused(batches: list[Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        columns_of(batches)


def test_weights_are_exported(run: Run, tmp_path: Path) -> None:
    module = weights(run)
    assert "step 4" in export_weights(run, "safetensors", str(tmp_path / "w.safetensors"), "last")
    assert load_file(tmp_path / "w.safetensors").keys() == module.state_dict().keys()
    export_weights(run, "pt2", str(tmp_path / "w.pt2"))
    rows = torch.rand(7, 2)  # another number than the batch it was traced with
    assert torch.equal(torch.export.load(tmp_path / "w.pt2").module()(rows), module(rows))
    export_weights(run, "hub", str(tmp_path / "hub"))
    assert torch.equal(torch.load(tmp_path / "hub/linear.pt")["weight"], module.linear.weight)
    assert "| best val/loss |" in (tmp_path / "hub/README.md").read_text()


def test_a_moved_run_is_found_with_its_job(run: Run, tmp_path: Path) -> None:
    Path(run.url).rename(tmp_path / "second")
    try:
        moved = run_at(str(tmp_path / "second"), ["data_args.rows=5"])
        assert (moved.url, moved.job.data_args) == (str(tmp_path / "second"), {"rows": 5})
        with pytest.raises(JobError, match="seed"):
            run_at(str(tmp_path / "second"), ["seed=-1"])
        with pytest.raises(UserError, match=f"holds runs and is none: name one of them, such as {tmp_path}/second"):
            run_at(str(tmp_path))
    finally:
        (tmp_path / "second").rename(run.url)


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str, str]:
    return run_command(*arguments), *capsys.readouterr()


def test_runs_are_shown_side_by_side(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = trained(Path(run.job.folder), "other", bias=False)
    picture = tmp_path / "compared.png"
    code, text, _ = said(capsys, "compare", run.url, other.url, "--picture", str(picture), "--json")
    shown = json.loads(text)
    assert (code, shown["runs"]) == (0, ["first", "other"])
    assert shown["settings"] == {"module_args.bias": [None, False]}
    assert shown["values"]["steps"] == [4, 4]
    assert len({*shown["values"]["best val/loss"]}) == 2
    assert picture.read_bytes().startswith(b"\x89PNG")
    code, text, _ = said(capsys, "compare", run.url, other.url)
    assert "module_args.bias" in text
    code, _, error = said(capsys, "compare", run.url)
    assert (code, "two runs are needed" in error) == (2, True)


def test_a_run_of_a_job_is_compared_with_that_of_a_script(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, rows = tmp_path / "script", TensorDataset(torch.ones(8, 1))
    Trainer(max_steps=4).fit(Net(), DataLoader(rows, 4), run=str(script))
    code, text, _ = said(capsys, "compare", run.url, str(script), "--json")
    settings = json.loads(text)["settings"]
    assert (code, settings["samples"], settings["SGD: lr"][0]) == (0, [12, 8], 1e-4)
    assert not {"run", "text_hash", "precision", "max_steps", "name"} & {*settings}, settings
    code, text, _ = said(capsys, "compare", str(script), str(script), "--json")
    assert json.loads(text)["settings"] == {}


def test_a_run_is_tested_and_predicted_by_command(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = said(capsys, "test", run.url, "--set", "data_args.rows=5", "--json")
    assert (code, json.loads(text)) == (0, {"test/rows": 5.0})
    output = str(tmp_path / "p.csv")
    code, text, _ = said(capsys, "predict", run.url, "--output", output, "--json")
    assert (code, json.loads(text)["rows"]) == (0, 12)
    code, _, error = said(capsys, "predict", run.url, "--output", "p.txt")
    assert (code, ".parquet" in error) == (2, True)


def test_a_module_whose_test_step_is_none_has_no_test_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = type("Tested", (Net,), {"test_step": Net.training_step})()
    module.test_step = None
    monkeypatch.setattr(evaluate, "of_one_process", lambda job: (None, module, None))
    job: Any = None
    assert evaluate._test(job, "") == {}
