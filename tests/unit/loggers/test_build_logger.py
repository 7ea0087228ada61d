"""From a logger's name to the logger, and what of it is refused; and the rows that it is given."""

import re
import sys
from pathlib import Path

import pytest
from support.refused import fit

from midstride.engine.config.loggers import LoggerOptions, run_name_faults
from midstride.engine.errors import EngineError, JobError
from midstride.engine.loggers.base import CommittedRows, Row
from midstride.engine.loggers.build_logger import build_logger, logger_errors

OF_ONES_OWN = """
from midstride.engine import Logger

class Mine(Logger):
    def __init__(self, size: int = 1) -> None:
        if size < 0:
            raise ValueError("a size below 0")
        self.size = size

    def open(self, run, rows):
        return 0

    def log_rows(self, rows):
        pass

class Other(Mine):
    def log_rows(self):
        pass

def none() -> int:
    return 7
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"own_logger_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(OF_ONES_OWN)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_a_logger_of_ones_own_is_built_with_its_arguments(own: str) -> None:
    logger = build_logger(LoggerOptions(path=f"{own}:Mine", args={"size": 3}))
    assert type(logger) is sys.modules[own].Mine
    assert logger.size == 3  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("Mine", {"sise": 3}, "loggers.0.args.sise: {own}:Mine takes no 'sise', did you mean 'size'?; it takes size"),
        ("Mine", {"size": -1}, "a size below 0"),
        ("none", {}, "loggers.0: {own}:none gives a int; a Logger is needed"),
        ("Nine", {}, "Nine"),
        ("Other", {}, "loggers.0: Other.log_rows(self) is called as log_rows(self, rows): "),
    ],
)
def test_what_gives_no_logger_is_refused(own: str, name: str, args: dict[str, int], message: str) -> None:
    options = LoggerOptions(path=f"{own}:{name}", args=args)
    (found,) = [line for line in logger_errors([options]) if message.format(own=own) in line]
    with pytest.raises(EngineError) as caught:
        build_logger(options, "loggers.0")
    assert found in str(caught.value)


@pytest.mark.parametrize(
    ("name", "legal"),
    [("lr:0.1", "lr-0.1"), ("a;b,c#d?e'f", "a-b-c-d-e-f"), (" a", "a"), ("a b=1", None), ("plain", None)],
)
def test_a_name_that_no_tracker_takes_is_refused_first(name: str, legal: str | None, tmp_path: Path) -> None:
    loggers = [LoggerOptions(path=path) for path in ("tensorboard", "wandb")]
    if legal is None:
        assert run_name_faults(loggers, name) == []
        return
    run = tmp_path / name
    with pytest.raises(JobError, match=f"loggers.1: wandb takes no.*: name it '{re.escape(legal)}'$"):
        fit(run, loggers=["tensorboard", {"wandb": {"mode": "offline"}}])
    assert not run.exists()


def test_rows_keep_the_order_of_segments_on_each_read() -> None:
    rows = CommittedRows(["epoch,step,loss,lr\n0,1,0.5,\n0,2,,0.1\n", "epoch,step,val\n1,3,2\n"])
    wanted = [Row(0, 1, {"loss": 0.5}), Row(0, 2, {"lr": 0.1}), Row(1, 3, {"val": 2.0})]
    assert list(rows) == list(rows) == wanted
    assert (rows.last_step, CommittedRows([]).last_step) == (3, 0)
