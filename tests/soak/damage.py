"""Damage files of runs that were killed once, killed often, or finished, and finish them.

Each ends with its bits, or says what it lacks.

make soak-damage
make soak-damage ARGS="--cases 5000 --seed 500"
"""

import argparse
import csv
import io
import logging
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from laws.lives import Setting, live
from unit.cli.test_app import run as command

from midstride.engine.errors import EngineError
from midstride.engine.fault_injection import FaultPlan
from midstride.engine.snapshots.reader import Weights, load_weights
from midstride.engine.state.differences import differences
from midstride.engine.storage.store import Store
from midstride.engine.testing import final_state

SETTING = Setting(options={"snapshots": {"every_steps": 2, "keep": 3}})
#: what became of the run before a file of it is damaged -> steps at which it was killed
STORIES: dict[str, list[int]] = {"killed once": [9], "killed often": [3, 5, 7, 9], "finished": []}


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


def told(story: str, top: Path) -> Path:
    """Train a run with a story in the folder `top`; return the run's."""
    for step in STORIES[story]:
        plan = FaultPlan(top / f"plan{step}").add("kill", step=step, phase="backward")
        assert live(SETTING, top, plan) == [-9]
    if not STORIES[story]:
        assert live(SETTING, top) == [0]
    return top / "run"


def assert_survives(seed: int, folder: Path, told_at: Callable[[str], Path], said: Callable[[], str]) -> str:
    """Damage a file of a copy of a run, by `seed`, and finish it; return what was done.

    Args:
        seed: which run, which file, and how.
        folder: where the copy is made.
        told_at: returns the folder of the run with a story.
        said: returns what was logged since.
    """
    story = [*STORIES][seed % len(STORIES)]
    run = folder / "run"
    shutil.copytree(told_at(story), run, symlinks=True)
    how = f"{story}, {damage(run, random.Random(seed))}"
    words = finish(str(run)) + said()
    assert_alike(str(run), str(told_at("finished")), words, f"{how}\n{words}")
    return how


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


def main() -> None:
    """Damage as many files as are asked for, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        runs = {story: told(story, _made(Path(name, story))) for story in STORIES}
        for seed in range(arguments.seed, arguments.seed + arguments.cases):
            log = io.StringIO()
            logging.basicConfig(stream=log, level=logging.INFO, force=True)
            folder = _made(Path(name, str(seed)))
            print(f"{seed}: {assert_survives(seed, folder, runs.__getitem__, log.getvalue)}", flush=True)
            shutil.rmtree(folder)
    print(
        f"{arguments.cases} damaged files, seeds from {arguments.seed} on: each run has its bits, or said what it lacks"
    )


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


if __name__ == "__main__":
    main()
