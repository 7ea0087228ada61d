"""Whatever is done to a file of a run, it ends with the bits of the run that nothing befell, or says what it lacks."""

import csv
import io
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from laws.lives import Setting, live
from unit.cli.test_app import run as command

from midstride.engine.errors import EngineError
from midstride.engine.fault_injection import FaultPlan
from midstride.engine.snapshots.weights import Weights, load_weights
from midstride.engine.state.codec import differences
from midstride.engine.storage.store import Store
from midstride.engine.testing import final_state

SETTING = Setting(options={"snapshots": {"every_steps": 2, "keep": 3}})
#: what became of the run before a file of it is damaged -> steps at which it was killed
STORIES: dict[str, list[int]] = {"killed once": [9], "killed often": [3, 5, 7, 9], "finished": []}
CASES, ALL_CASES = 30, 510


def _flipped(data: bytes, draw: random.Random, other: bytes) -> bytes:
    changed = bytearray(data or b"\0")
    changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


#: kind -> what becomes of the bytes of a file; draws come from a generator, and another file's bytes are at hand
CHANGED: dict[str, Callable[[bytes, random.Random, bytes], bytes]] = {
    "flipped": _flipped,
    "truncated": lambda data, draw, other: data[: draw.randrange(max(1, len(data)))],
    "swapped": lambda data, draw, other: other,
    "garbage": lambda data, draw, other: draw.randbytes(len(data)),
    "nested deep": lambda data, draw, other: b"[" * 200_000,
}
KINDS = [*CHANGED, "gone", "a folder", "a loop of links"]


def damage(run: Path, draw: random.Random) -> str:
    """Damage one file of `run`; say how."""
    files = sorted(path for path in run.rglob("*") if path.is_file())
    # The folders have as many files as each other has snapshots: each kind of file comes as often as any other.
    kinds = sorted({_kind(run, path) for path in files})
    kind = draw.choice(kinds)
    path = draw.choice([path for path in files if _kind(run, path) == kind])
    how = draw.choice(KINDS)
    data, other = path.read_bytes(), draw.choice(files).read_bytes()
    path.unlink()
    if how == "a folder":
        path.mkdir()
    elif how == "a loop of links":
        path.symlink_to(path.name)
    elif how in CHANGED:
        path.write_bytes(CHANGED[how](data, draw, other))
    return f"{path.relative_to(run)}: {how}"


def _kind(run: Path, path: Path) -> str:
    folder = path.relative_to(run).parts[0]
    return f"{folder} {path.name if folder == 'snapshots' else path.suffix}"


@pytest.fixture(scope="session")
def told(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a run with a story."""
    done: dict[str, Path] = {}

    def folder(story: str) -> Path:
        if story not in done:
            done[story] = top = tmp_path_factory.mktemp("told")
            for step in STORIES[story]:
                (top / f"plan{step}").mkdir()
                plan = FaultPlan(top / f"plan{step}").add("kill", step=step, phase="backward")
                assert live(SETTING, top, plan) == [-9]
            if not STORIES[story]:
                assert live(SETTING, top) == [0]
        return done[story] / "run"

    return folder


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        cases = ALL_CASES if metafunc.config.getoption("laws") == "all" else CASES
        metafunc.parametrize("seed", range(cases))


def test_a_damaged_file_is_named_or_does_no_harm(
    seed: int, told: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    story = [*STORIES][seed % len(STORIES)]
    run = tmp_path / "run"
    shutil.copytree(told(story), run, symlinks=True)
    how = damage(run, random.Random(seed))
    said = finish(str(run)) + caplog.text
    assert_alike(str(run), str(told("finished")), said, f"{story}, {how}\n{said}")


def finish(run: str) -> str:
    """Train to the end; where that is refused, say why, repair what there is to repair, and train."""
    try:
        SETTING.train(run)
    except EngineError as error:
        assert command("snapshots", "repair", run, "--yes") == 0
        SETTING.train(run)
        return str(error)
    return ""


def assert_alike(run: str, expected: str, said: str, words: str) -> None:
    (ours,), (theirs,) = final_state(run), final_state(expected)
    assert not differences(ours, theirs), words
    assert same_weights(run, expected, "last"), words
    assert same_weights(run, expected, "best") or "older ones count" in said, words
    assert not wrong_rows(rows(run), rows(expected)), words
    assert len(rows(run)) == len(rows(expected)) or "metrics.csv will have a gap" in said, words


def same_weights(run: str, expected: str, folder: str) -> bool:
    """Whether two runs have the same weights there; none are others than some."""

    def found(url: str) -> Weights | None:
        try:
            return load_weights(Store.open(url), folder)
        except EngineError:
            return None

    ours, theirs = found(run), found(expected)
    assert theirs is not None
    return ours is not None and not differences(ours.state_dict, theirs.state_dict)


def rows(run: str) -> list[dict[str, Any]]:
    text = Store.open(run).read("metrics.csv").decode()
    return [{key: value for key, value in row.items() if value} for row in csv.DictReader(io.StringIO(text))]


def wrong_rows(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    by_step = {row["step"]: row for row in theirs}
    assert len({row["step"] for row in ours}) == len(ours), "a step has two rows"
    return [row for row in ours if by_step[row["step"]] != row]
