"""The example that the README speaks of: its data are whole or not there, and it trains."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fork_server import run_program

from midstride.engine import BestCheckpoint, Trainer
from midstride.engine.config.job import TrainingJob

EXAMPLE = Path(__file__).parents[2] / "docs/examples/digits"


@pytest.fixture
def digits(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    sys.modules.pop("model", None)  # that of another job
    import model

    yield model
    sys.modules.pop("model")


def test_its_job_is_in_order():
    job = TrainingJob.load(EXAMPLE / "job.yaml")
    assert (job.world.strategy, job.world.processes) == ("ddp", 2)


def test_preparing_twice_writes_once(digits: Any, tmp_path: Path):
    data = digits.Digits(folder=str(tmp_path))
    data.prepare_data()
    written = (tmp_path / digits.FILE).stat()
    data.prepare_data()
    again = (tmp_path / digits.FILE).stat()
    assert (again.st_ino, again.st_mtime_ns) == (written.st_ino, written.st_mtime_ns)
    assert [path.name for path in tmp_path.iterdir()] == [digits.FILE]


@pytest.mark.parametrize("damage", [b"", b"not an archive", "cut", "flip"])
def test_damaged_data_are_prepared_again_and_never_used(digits: Any, tmp_path: Path, damage: bytes | str):
    data, path = digits.Digits(folder=str(tmp_path)), tmp_path / digits.FILE
    data.prepare_data()
    whole = path.read_bytes()
    flipped = whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:]
    path.write_bytes({"cut": whole[:-9], "flip": flipped}.get(damage, damage) if isinstance(damage, str) else damage)
    with pytest.raises(Exception, match=r"."):
        digits.Digits(folder=str(tmp_path)).setup("fit")
    data.prepare_data()
    assert path.read_bytes() == whole


def test_data_may_lie_at_a_url(digits: Any):
    data = digits.Digits(folder="memory://digits")
    data.prepare_data()
    data.setup("fit")
    assert len(data.labels) == 1797


def test_every_image_has_one_place(digits: Any, tmp_path: Path):
    data = digits.Digits(folder=str(tmp_path), shift=0)
    data.prepare_data()
    data.setup("fit")
    loaders = [data.train_dataloader(), data.val_dataloader(), data.test_dataloader()]
    images = torch.cat([torch.cat([x for x, _ in loader]) for loader in loaders])
    assert [len(loader.dataset) for loader in loaders] == [1197, 240, 360]
    assert torch.equal(images.flatten(1).sum(1).sort().values, data.images.flatten(1).sum(1).sort().values)


def test_shifts_keep_the_ink_that_stays_inside(digits: Any):
    image = torch.zeros(1, 1, 8, 8)
    image[0, 0, 4, 4] = 1
    shifted = digits.Shifted(image, torch.zeros(1), shift=1)
    seen = {tuple(shifted[0][0][0].nonzero()[0].tolist()) for _ in range(200)}
    assert seen == {(row, column) for row in (3, 4, 5) for column in (3, 4, 5)}


def test_it_learns(digits: Any, tmp_path: Path):
    """Half of what the job asks for, in one process.

    Its bits are those of the machine and its number of threads; over 360 images one standard deviation is 0.8 %.
    """
    trainer = Trainer(max_epochs=20, seed=7, callbacks=[BestCheckpoint("val/loss")], enable_progress_bar=False)
    module, data = digits.Classifier(), digits.Digits(folder=str(tmp_path / "data"), batch_size=32)
    trainer.fit(module, data, run=str(tmp_path / "run"))
    assert trainer.test(module, data, ckpt_path="best")["test/accuracy"] >= 0.95


@pytest.mark.parametrize("name", ["plain", "script"])
def test_its_scripts_start(name: str, tmp_path: Path):
    """They are run whole by hand; here they are imported, so that what they import exists."""
    program, log = tmp_path / "program.py", tmp_path / "output.txt"
    strict = "import sys, warnings; warnings.simplefilter('error')"
    program.write_text(f"{strict}; sys.path.insert(0, {str(EXAMPLE)!r}); import {name}")
    assert run_program(program, log) == 0, log.read_text()
