"""`midstride init`, `runs` and `report`: a project from nothing, and what its folder tells."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands import run

pytestmark = pytest.mark.usefixtures("forked_worlds")


OWN_LOGGER = """
from midstride.engine.loggers.base import Logger

class Own(Logger):
    def __init__(self, away=False):
        self.away = away

    def open(self, run, rows):
        if self.away:
            raise ConnectionError("no answer\\nfrom 10.0.0.1")
        return 0

    def log_rows(self, rows):
        assert rows
"""


def test_a_new_project_trains_and_its_folder_tells_how_it_went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("init", str(tmp_path / "circle")) == 0
    monkeypatch.chdir(tmp_path / "circle")
    assert run("check", "job.yaml") == 0
    assert run("fit", "job.yaml", "--run", "a", "--set", "trainer.max_epochs=1", "--set", "world.processes=1") == 0
    ended = capsys.readouterr().out
    assert "circle a: done" in ended
    assert "best val/accuracy" in ended
    for name in ("report.md", "metrics.csv", "curves.png", "best"):
        assert f"{tmp_path}/circle/runs/a/{name}" in ended
        assert Path("runs/a", name).exists()

    assert run("report", "runs/a") == 0
    shown = capsys.readouterr().out
    assert shown == ended[ended.index("╭") :]

    assert run("export", "runs/a", "--to", "tensorboard", "--set", "log_dir=tracked") == 0
    assert capsys.readouterr().out == "tensorboard has the rows of runs/a up to step 75\n"
    assert [*Path("tracked/a").iterdir()]

    Path("mine.py").write_text(OWN_LOGGER)
    assert run("export", "runs/a", "--to", "mine:Own") == 0  # beside the job's own code
    monkeypatch.chdir("/")
    assert run("export", f"{tmp_path}/circle/runs/a", "--to", "mine:Own") == 0
    own = f"mine:Own has the rows of {tmp_path}/circle/runs/a up to step 75\n"
    assert capsys.readouterr().out == own.replace(f"{tmp_path}/circle/", "") + own
    monkeypatch.chdir(tmp_path / "circle")
    assert run("export", "runs/a", "--to", "mine:Own", "--set", "away=true") == 1
    assert capsys.readouterr().err == "mine:Own: ConnectionError: no answer. Call this again once it answers\n"

    assert run("runs", "runs", "--json") == 0
    (only,) = json.loads(capsys.readouterr().out)
    assert (only["name"], only["job"], only["state"], only["step"], only["attempts"]) == ("a", "circle", "done", 75, 1)
    assert only["best"][0] == "val/accuracy"


#: kind of project -> the example that it is: `tests/unit/test_examples.py`, or a test that it names, trains that
KINDS = {
    "images": "digits",
    "text": "text",
    "tabular": "tabular",
    "lightning": "lightning",
    "huggingface": "huggingface",
    "script": "own_loop",
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_project_is_an_example_that_trains(kind: str, tmp_path: Path) -> None:
    assert run("init", str(tmp_path), "--kind", kind) == 0
    example = Path(__file__).parents[3] / "docs/examples" / KINDS[kind]
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert len(written) == 2
    assert written == {name: (example / name).read_bytes() for name in written}


@pytest.fixture
def places(tmp_path: Path) -> Iterator[list[Path]]:
    """Return a home and a folder for temporary files that nothing else uses."""
    found = [tmp_path / "home", tmp_path / "temporary"]
    with pytest.MonkeyPatch.context() as patch:
        for place, variable in zip(found, ("HOME", "TMPDIR"), strict=True):
            place.mkdir()
            patch.setenv(variable, str(place))
        patch.setattr(tempfile, "tempdir", str(found[1]))
        patch.chdir(tmp_path)
        yield found


def test_a_removed_run_leaves_no_memory(places: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("init", ".") == 0
    fit = ("fit", "job.yaml", "--run", "a", "--set", "trainer.max_epochs=1", "--set", "world.processes=1")

    def trained() -> bytes:
        assert run(*fit) == 0
        assert "resumes" not in capsys.readouterr().out
        return Path("runs/a/metrics.csv").read_bytes()

    first = trained()
    assert run("check", "job.yaml") == 0
    assert run("test", "runs/a") == 0
    assert run("export", "runs/a", "--format", "safetensors", "--output", "a.safetensors") == 0
    shutil.rmtree("runs/a")
    assert [*Path("runs").iterdir()] == []
    left = {path.name for place in places for path in place.iterdir()}
    assert not [name for name in left if "midstride" in name], left
    capsys.readouterr()
    assert trained() == first


@pytest.mark.parametrize("content", [b"", b'{"run": "a', b"null", b"[5]", b"\xff\xfe", b'{"loggers": 5}'])
def test_a_damaged_run_json_is_named(tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.json").write_bytes(content)
    assert run("export", str(tmp_path)) == 1
    assert f"{tmp_path}/run.json is not in the format of this version" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("", "--to", "nope"), "--to: unknown logger 'nope': choose one of tensorboard, mlflow"),
        (("", "--to", "tensorboard", "--set", "dir"), "--set dir: write it as key=value, such as log_dir=/tmp/tb"),
        (("/run.json", "--to", "tensorboard"), "there is no run 'run.json' in {above}: midstride"),
        (("/none", "--to", "tensorboard"), "there is no run 'none' in {above}: midstride fit JOB"),
    ],
)
def test_refused_exports_use_the_words_of_the_command(
    tmp_path: Path, arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.json").write_text("{}")
    assert run("export", f"{tmp_path}{arguments[0]}", *arguments[1:]) == 2
    assert said.format(above=tmp_path) in capsys.readouterr().err


def test_a_project_that_is_there_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text("mine")
    assert run("init", str(tmp_path)) == 2
    assert f"{tmp_path} has model.py already, so nothing was written: name another folder" in capsys.readouterr().err
    assert (tmp_path / "model.py").read_text() == "mine"
    assert not (tmp_path / "job.yaml").exists()
    assert run("init", str(tmp_path / "model.py")) == 2
    assert f"{tmp_path}/model.py cannot be written: [Errno 17] File exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("head",), "ADDRESS: expected HOST:PORT, as in world.rendezvous of the job, not 'head'"),
        (("head:99999",), "not 'head:99999'"),
        ((":29400",), "not ':29400'"),
        (("head:29400", "--wait", "nan"), "--wait: a number of seconds is needed, not nan"),
        (("head:29400", "--wait", "-1"), "--wait: a number of seconds is needed, not -1"),
    ],
)
def test_where_no_node_can_join_is_said_at_once(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("join", *arguments) == 2
    assert said in capsys.readouterr().err


def test_a_node_needs_the_secret_of_its_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("join", "nowhere.invalid:29400") == 2
    assert "the run's secret is missing: pass --secret-file FILE" in capsys.readouterr().err


def test_a_node_says_for_what_it_waits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("5" * 64)
    assert run("join", "nowhere.invalid:29400", "--secret-file", str(secret), "--wait", "0.6") == 1
    said = capsys.readouterr()
    assert said.out.count("no launcher answers at nowhere.invalid:29400 yet (") == 1
    assert "waiting for it, 0.6 s at most" in said.out
    assert "no launcher answers at nowhere.invalid:29400 (" in said.err


def test_a_store_of_several_runs_has_no_one_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "ab":
        (tmp_path / "runs" / name / "snapshots").mkdir(parents=True)
    assert run("report", str(tmp_path / "runs")) == 2
    assert f"{tmp_path}/runs is a store of 2 runs, not one of them: name one, such as a, b" in capsys.readouterr().err
    assert run("runs", str(tmp_path / "runs")) == 0
    assert capsys.readouterr().out.count("not started") == 2
