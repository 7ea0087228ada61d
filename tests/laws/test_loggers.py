"""Loggers: after any number of deaths a tracker holds the rows of metrics.csv, none twice, none missing."""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from laws.lives import STEPS, Setting, assert_alike, live
from support.champions import promote
from support.limit import LIMIT_S
from support.trackers import (
    Table,
    ended_in_mlflow,
    ended_in_wandb,
    hyperparameters_in_mlflow,
    hyperparameters_in_tensorboard,
    hyperparameters_in_wandb,
    in_mlflow,
    in_tensorboard,
    in_wandb,
    rows_of,
    serve_mlflow,
)
from unit.cli.test_app import run as command

from midstride.engine import BestCheckpoint, Callback, EarlyStopping, LearningRateMonitor, Logger, Trainer
from midstride.engine.cli.export import export
from midstride.engine.config.job import TrainingJob
from midstride.engine.config.loggers import LOGGERS, checked_loggers
from midstride.engine.errors import JobError, UserError
from midstride.engine.fault_injection import FaultPlan
from midstride.engine.jobs.publish import publish
from midstride.engine.loggers.base import CommittedRows, Conclusion, LoggedRun, Row
from midstride.engine.loggers.delivery import Delivery
from midstride.engine.loggers.logger_processes import conclude
from midstride.engine.loggers.tensorboard import TensorBoardLogger
from midstride.engine.runs.run import Run
from midstride.engine.storage.store import Store
from midstride.engine.testing import run_ranks
from midstride.engine.testing.laws.small_training import SmallData, SmallModule

#: steps whose row is sent when the rank dies, and kills in other places: phase -> step
CUT, KILLS = [3, 8], {"forward": 5, "before_commit": 6}


@dataclass(frozen=True)
class Tracker:
    """A logger that dies, and how what its tracker holds of the run in a folder is read back."""

    path: str
    args: dict[str, Any]
    read: Callable[[Path], Table]
    #: how it keeps a number
    rounded: Callable[[float], float] = float


@pytest.fixture(scope="module")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory, lasting: set[int]) -> Iterator[str]:
    """The address of an MLflow server on sqlite."""
    with serve_mlflow(tmp_path_factory.mktemp("mlflow")) as (address, processes):
        lasting.update(processes)
        yield address


@pytest.fixture(params=["tensorboard", "mlflow", "wandb"])
def tracker(request: pytest.FixtureRequest, tmp_path: Path) -> Tracker:
    if request.param == "tensorboard":
        return Tracker(
            "support.trackers:DyingTensorBoard", {}, lambda folder: in_tensorboard(folder / "run"), np.float32
        )
    if request.param == "wandb":
        return Tracker("support.trackers:DyingWandb", {"mode": "offline"}, lambda folder: in_wandb(folder, "run"))
    server = request.getfixturevalue("mlflow_server")
    args = {"tracking_uri": server, "experiment": tmp_path.name}
    return Tracker("support.trackers:DyingMLflow", args, lambda folder: in_mlflow(server, tmp_path.name))


def assert_holds_all(tracker: Tracker, folder: Path) -> None:
    """The rows that the tracker has are those of metrics.csv."""
    rows = rows_of(folder / "run")
    assert len(rows) == STEPS
    expected = {step: {n: float(tracker.rounded(v)) for n, v in row.items()} for step, row in rows.items()}
    assert tracker.read(folder) == expected


def live_to_the_end(setting: Setting, folder: Path, plan: FaultPlan | None = None) -> int:
    """Give the run lives until one ends as it should; return how many."""
    for life in range(1, 9):
        codes = live(setting, folder, plan)
        if codes == [0] * setting.ranks:
            return life
        assert -9 in codes, f"ranks ended with {codes}"
    raise AssertionError("the run does not come to its end")


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_tracker_holds_the_rows_of_the_run_after_many_deaths(
    tracker: Tracker, ranks: int, tmp_path: Path, pytestconfig: pytest.Config, undisturbed: Callable[[Setting], Path]
) -> None:
    """Its bits are those of a run without loggers.

    Also after it goes back: what was sent of steps that are then trained otherwise is nowhere to be seen.
    """
    is_tensorboard = "TensorBoard" in tracker.path
    if ranks > 1 and not is_tensorboard:
        pytest.skip("rank 0 alone delivers: one logger shows it")
    # What is due after a death is the delivery's; what a tracker has of a request that was cut short, each logger's.
    kills = KILLS if is_tensorboard or pytestconfig.getoption("--laws") == "all" else {}
    logger = {"path": tracker.path, "args": {"marks": str(tmp_path), "steps": CUT, **tracker.args}}
    setting = Setting(ranks=ranks, options={"loggers": [logger], "snapshots": {"every_steps": 1, "keep": 20}})
    plan = FaultPlan(tmp_path / "plan")
    for phase, step in kills.items():
        plan.add("kill", step=step, phase=phase)
    assert live_to_the_end(setting, tmp_path, plan) == len(CUT) + len(kills) + 1
    plan.assert_all_fired()
    assert all((tmp_path / f"died-{step}").exists() for step in CUT)
    assert_holds_all(tracker, tmp_path)
    assert_alike(tmp_path, undisturbed(replace(setting, options={"snapshots": setting.options["snapshots"]})))
    if ranks == 1:
        before = rows_of(tmp_path / "run")
        assert run_ranks(go_back, setting, str(tmp_path / "run")) == [0]
        after = rows_of(tmp_path / "run")
        assert next(step for step in after if after[step] != before[step]) > 8
        assert_holds_all(tracker, tmp_path)


def test_a_run_moved_to_another_machine_continues_its_tracker_run(tracker: Tracker, tmp_path: Path) -> None:
    """The machine has another folder; W&B's offline folder is written anew there, under the same id."""
    logger = {"path": tracker.path, "args": {"marks": str(tmp_path), "steps": [], **tracker.args}}
    here, there = tmp_path / "here", tmp_path / "there"
    for folder, epochs in ((here, 1), (there, 2)):
        Setting(options={"loggers": [logger], "max_epochs": epochs}).train(str(folder / "run"))
        assert tracker.read(folder) == {
            step: {name: float(tracker.rounded(value)) for name, value in row.items()}
            for step, row in rows_of(folder / "run").items()
        }
        if folder == here:
            there.mkdir()
            shutil.move(here / "run", there)
    assert len(rows_of(there / "run")) == STEPS
    ids = {path.name.rpartition("-")[2] for path in tmp_path.glob("*/wandb/offline-run-*")}
    assert len(ids) == int("Wandb" in tracker.path)


def go_back(setting: Setting, run: str) -> None:
    """Train again from step 8, with smaller gradients."""
    options = {**setting.options, "gradient_clip_val": 1e-3, "accept_change": ["gradient_clip_val"]}
    trainer = Trainer(
        strategy="single",
        seed=7,
        max_epochs=2,
        val_check_interval=0.5,
        callbacks=[BestCheckpoint("val/loss"), EarlyStopping("val/loss", patience=100), LearningRateMonitor()],
        enable_progress_bar=False,
        **options,
    )
    trainer.fit(setting.module(), setting.data(1, 0, setting.validation), run=run, resume=8)


#: what module, data and `log_hyperparams` of `laws.lightning.tracked` tell
HYPERPARAMETERS = {
    **{"module_args.hidden": 8, "module_args.lr": 0.05, "data_args.batch_size": 4, "data_args.scale": 0.5},
    **{"trial.head": "linear", "threshold": 0.5, "folds": 5, "found_rate": "nan"},
    **{"late": True, "later": "yes", "latest": 3},
}


def test_hyperparameters_reach_each_tracker_once_despite_deaths(mlflow_server: str, tmp_path: Path) -> None:
    """Those of module and data, and those that are logged before, while and after the run dies."""
    mlflow = {"tracking_uri": mlflow_server, "experiment": tmp_path.name}
    loggers = ["tensorboard", {"mlflow": mlflow}, {"wandb": {"mode": "offline"}}]
    assert run_ranks(in_a_fork, str(tmp_path), loggers) == [0]
    texts = {name: str(value) for name, value in HYPERPARAMETERS.items()}
    told = json.loads((tmp_path / "run" / "run.json").read_text())
    assert told["hparams"]["trial"] == {"head": "linear"}
    for found, expected in [
        (hyperparameters_in_tensorboard(tmp_path / "run"), HYPERPARAMETERS),
        (hyperparameters_in_mlflow(mlflow_server, tmp_path.name), texts),
        (hyperparameters_in_wandb(tmp_path, "run"), HYPERPARAMETERS),
    ]:
        assert {name: found.get(name) for name in expected} == expected
        assert "seed" in found
    rows = rows_of(tmp_path / "run")
    assert len(rows) == 12
    assert {step: len(row) for step, row in in_tensorboard(tmp_path / "run").items()} == {
        step: len(row) for step, row in rows.items()
    }
    assert in_mlflow(mlflow_server, tmp_path.name) == in_wandb(tmp_path, "run") == rows
    result, store = {"test/acc": 0.5}, Store.open(tmp_path / "run")
    assert ended_in_mlflow(mlflow_server, tmp_path.name)["why"].startswith("max_epochs "), "as training ended"
    for report in ("# first", "# second", "# second"):
        conclude(checked_loggers(loggers)[0], store, Conclusion("stopped", "stopped by SIGTERM", 12, result, report))
    assert in_tensorboard(tmp_path / "run")[12] == pytest.approx({**rows[12], **result})
    assert ended_in_mlflow(mlflow_server, tmp_path.name) == {
        **{"why": "stopped by SIGTERM", "test/acc": 0.5, "status": "KILLED", "kind": "custom_model_development"},
        **{"hyperparameters.json": str(HYPERPARAMETERS["module_args.lr"]), "report.md": "# second"},
    }
    assert ended_in_wandb(tmp_path, "run") == {"ended": "stopped by SIGTERM", **result}
    assert in_wandb(tmp_path, "run") == rows


def in_a_fork(folder: str, loggers: list[Any]) -> None:
    """Import Lightning, which takes seconds, where nothing else is tested."""
    from laws.lightning.tracked import live_tracked

    live_tracked(folder, loggers)


class LogsLater(Callback):
    """Adds a hyperparameter from step 3 on."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step > 2:
            trainer.metric_logger.hparams["found"] = 7


def test_later_hyperparameters_are_sent_with_their_snapshot(tmp_path: Path) -> None:
    """One delivery, that goes on over both."""
    delivery = Delivery(Store.open(str(tmp_path / "run")), TensorBoardLogger())
    for steps, found in [(2, {}), (4, {"found": 7.0})]:
        trainer = Trainer(max_steps=steps, callbacks=[LogsLater()], enable_progress_bar=False)
        trainer.fit(SmallModule(), SmallData(1), run=str(tmp_path / "run"))
        delivery.deliver()
        told = hyperparameters_in_tensorboard(tmp_path / "run")
        assert {name: value for name, value in told.items() if name == "found"} == found
        assert [*in_tensorboard(tmp_path / "run")] == [*range(1, steps + 1)]
    delivery.close()


class OpensAt(Logger):
    def __init__(self, step: Any) -> None:
        self.step = step

    def open(self, run: LoggedRun, rows: CommittedRows) -> int:
        return self.step

    def log_rows(self, rows: Sequence[Row]) -> None: ...


@pytest.mark.parametrize("step", [None, "2", 2.0])
def test_a_logger_that_does_not_say_where_it_stands_is_named(step: Any, tmp_path: Path) -> None:
    Trainer(max_steps=2, enable_progress_bar=False).fit(SmallModule(), SmallData(1), run=str(tmp_path / "run"))
    delivery = Delivery(Store.open(str(tmp_path / "run")), OpensAt(step))
    with pytest.raises(UserError, match=f"OpensAt.open returned {step!r}: return the step of the tracker's last row"):
        delivery.deliver()


def test_a_tracker_that_is_away_catches_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its rows are said to be missing at the end, and `export` sends them; what is there is not sent again."""
    # Its process may start slowly on a busy machine.
    monkeypatch.setattr("midstride.engine.loggers.logger_processes._GRACE_S", LIMIT_S)
    (tmp_path / "away").touch()
    logger = {"path": "support.trackers:Away", "args": {"away": str(tmp_path / "away")}, "wait_s": 0.1}
    setting = Setting(layout="every step", options={"loggers": [logger]})
    run = str(tmp_path / "run")
    setting.train(run)
    told = capfd.readouterr().err
    assert told.count("ConnectionError: no answer. Training continues") == 1
    assert f"12 steps are left. midstride export {run} --to support.trackers:Away sends them" in told
    assert not in_tensorboard(tmp_path / "run")
    (tmp_path / "away").unlink()
    for _ in range(2):
        assert export(run) == 0
        assert {step: len(row) for step, row in in_tensorboard(tmp_path / "run").items()} == {
            step: len(row) for step, row in rows_of(tmp_path / "run").items()
        }


@pytest.mark.parametrize(("how", "said"), [("exits", "its process ended with 1"), ("hangs", "it hung for 0.1 s")])
def test_a_logger_that_cannot_report_is_named_as_missing_rows(
    tmp_path: Path, how: str, said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("midstride.engine.loggers.logger_processes._GRACE_S", 1.0 if how == "hangs" else LIMIT_S)
    logger = {"path": "support.trackers:Silent", "args": {"how": how}, "wait_s": 0.1}
    run = str(tmp_path / "run")
    Setting(layout="every step", options={"loggers": [logger]}).train(run)
    told = capfd.readouterr().err
    assert f"support.trackers:Silent: not everything of {run} was sent: {said}" in told
    assert f"midstride export {run} --to support.trackers:Silent sends them" in told


def test_a_run_leaves_the_offline_folder_of_another_alone(tmp_path: Path) -> None:
    """Also where the name of one ends with that of the other."""
    setting = Setting(layout="every step", options={"loggers": [{"wandb": {"mode": "offline"}}]})
    for name in ("other-run", "run"):
        setting.train(str(tmp_path / name))
    for name in ("other-run", "run"):
        assert in_wandb(tmp_path, name) == rows_of(tmp_path / name)


def test_runs_of_one_name_and_two_places_have_each_their_own(tmp_path: Path) -> None:
    """W&B tells them apart; what TensorBoard shows by their name is the first one's, and the other is told so."""
    both = [{"wandb": {"mode": "offline", "dir": str(tmp_path)}}, {"tensorboard": {"log_dir": str(tmp_path)}}]
    for place in ("here", "there"):
        Setting(layout="every step", options={"loggers": both}).train(str(tmp_path / place / "run"))
    assert len([*tmp_path.glob("wandb/offline-run-*")]) == 2
    assert json.loads((tmp_path / "run" / "midstride-run.json").read_text())["url"] == str(tmp_path / "here" / "run")


def test_what_is_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOGGERS, "wandb", LOGGERS["wandb"]._replace(needs="not_there"))
    with pytest.raises(JobError) as caught:
        Trainer(loggers=["wandb", {"tensorboard": {"logdir": "a"}}])
    assert str(caught.value).splitlines()[1:] == [
        '  loggers.0: not_there is not installed: pip install "midstride[wandb]"',
        "  loggers.1.args.logdir: tensorboard takes no 'logdir', did you mean 'log_dir'?; it takes log_dir",
    ]


def test_loggers_need_a_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="fit needs a run"):
        Trainer(loggers=["tensorboard"], max_steps=1).fit(SmallModule(), SmallData(1))


def test_the_champion_is_the_registered_model_in_charge(mlflow_server: str, tmp_path: Path) -> None:
    """Promoted, told again, rolled back, also where its run was removed; a tracker that is away is told later."""
    assert run_ranks(promote_and_roll_back, mlflow_server, str(tmp_path)) == [0]


def promote_and_roll_back(server: str, path: str) -> None:
    """Try what the registry has after each step, in a process of its own: MLflow leaves threads."""
    from mlflow import MlflowClient

    folder = Path(path)

    def job(server: str) -> TrainingJob:
        args = {"tracking_uri": server, "registered_model": folder.name}
        return TrainingJob(
            name="digits",
            module="model:Net",
            data="model:Data",
            loggers=[{"mlflow": args}, "tensorboard"],
            trainer={"max_epochs": 1},
            snapshots={"url": str(folder / "runs")},
        )

    def version_in_charge() -> str:
        version = client.get_model_version_by_alias(folder.name, "champion")
        experiment = client.get_experiment(client.get_run(version.run_id).info.experiment_id)
        assert experiment.name == "digits", "the job's, where its runs are"
        file = client.download_artifacts(version.run_id, "champion/weights.safetensors", path)
        return f"{version.version} {Path(file).read_text()}"

    client, here = MlflowClient(tracking_uri=server), job(server)
    for number, run in enumerate(["digits-1", "digits-2"]):
        promote(here, run, number or None)
        Run(here, run).save_job()
        away = publish(Run(job("http://127.0.0.1:1"), run))
        assert [one.partition(", the next night sends it: ")[0] for one in away] == [
            f"mlflow was not told that {run} is champion of digits"
        ]
        for _ in range(2):
            assert publish(Run(here, run)) == []
            assert version_in_charge() == f"{number + 1} weights of {run}"
    shutil.rmtree(folder / "runs" / "digits-1")
    assert command("champion", "rollback", str(folder / "runs")) == 0
    assert version_in_charge() == "1 weights of digits-1"
    assert len(client.search_model_versions(f"name = '{folder.name}'")) == 2
