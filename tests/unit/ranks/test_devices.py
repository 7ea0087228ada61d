"""Which devices are meant: the tables of GPUs, devices and cores; which are free, and whose each is."""

import json
import socket
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from midstride.engine.errors import JobError
from midstride.engine.optim.precision import Precision
from midstride.engine.ranks import gpus
from midstride.engine.ranks.devices import ensure_devices
from midstride.engine.ranks.gpus import parse_devices, parse_gpus
from midstride.engine.ranks.placement import parse_tpu_cores
from midstride.engine.strategies.collective import SingleProcess
from midstride.engine.strategies.ddp import Ddp
from midstride.engine.training.trainer import Trainer
from midstride.engine.world import World

#: how devices are named -> what names mean, on a machine with four GPUs or without
MEANT: list[tuple[Callable[..., Any], Any, Any]] = [
    *((partial(parse_gpus, available=4), given, []) for given in (None, 0)),
    (partial(parse_gpus, available=4), 3, [0, 1, 2]),
    *((partial(parse_gpus, available=4), given, [0, 1, 2, 3]) for given in (-1, "-1")),
    *((partial(parse_gpus, available=4), given, [0]) for given in ([0], "0")),
    *((partial(parse_gpus, available=4), given, [1, 3]) for given in ([1, 3], "1, 3")),
    (partial(parse_gpus, available=4), "3", [3]),
    *((partial(parse_devices, available=0), given, meant) for given, meant in ((None, ([], 1)), ("auto", ([], 1)))),
    (partial(parse_devices, available=2), "auto", ([0, 1], 2)),
    (partial(parse_devices, available=0), 3, ([], 3)),
    (partial(parse_devices, available=4), None, ([0], 1)),
    (partial(parse_devices, available=4), 3, ([0, 1, 2], 3)),
    (partial(parse_devices, available=4), [1, 3], ([1, 3], 2)),
    (partial(parse_devices, available=4), -1, ([0, 1, 2, 3], 4)),
    *((parse_tpu_cores, given, meant) for given, meant in ((1, (1, None)), (8, (8, None)), ("8", (8, None)))),
    (parse_tpu_cores, [5], (1, 5)),
]
WRONG_GPUS = [0.1, -2, False, True, [-1], [None], ["0"], [0, 0], "a", [4], 5, "4", "1, 9", [], "", "0, 0", "-2", {}]
WRONG_CORES = [0, 2, -1, True, 8.0, "5", "[5]", "all", [], [8], [-1], [1, 2], ["1"], {}]
#: (how they are parsed, what is given, argument, words of the error)
WRONG: list[tuple[Callable[..., Any], Any, str, str]] = [
    *((partial(parse_gpus, available=4), one, "gpus", "there are GPUs 0 to 3 here") for one in [*WRONG_GPUS, [True]]),
    *((lambda given: Trainer(gpus=given), one, "gpus", "there is no GPU here") for one in (1, -1, [0], "0")),
    *(
        (partial(parse_devices, available=0), one, "devices", "there is no GPU here")
        for one in ("2", 0, -1, -3, True, 1.0, [0], "all")
    ),
    *(
        (parse_tpu_cores, one, "tpu_cores", "1 or 8 of them are needed, or a list with the index of one")
        for one in WRONG_CORES
    ),
]


def _named(value: Any) -> str:
    return getattr(value, "func", value).__name__ if callable(value) else repr(value)


@pytest.mark.parametrize(("parse", "given", "meant"), MEANT, ids=_named)
def test_devices_mean_what_the_table_says(parse: Callable[..., Any], given: Any, meant: Any) -> None:
    assert parse(given) == meant


@pytest.mark.parametrize(("parse", "given", "name", "words"), WRONG, ids=_named)
def test_other_devices_are_refused_with_what_was_given(
    parse: Callable[..., Any], given: Any, name: str, words: str
) -> None:
    with pytest.raises((ValueError, JobError), match=words) as caught:
        parse(given)
    assert f"{name}={given!r}" in str(caught.value)


def test_the_ranks_of_a_world_choose_among_one_list_of_free_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    looks: list[int] = []

    def found() -> list[int]:
        looks.append(len(looks))
        return [3, len(looks)]

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(gpus, "_free_gpus", found)
    with ThreadPoolExecutor(4) as ranks:
        lists = [*ranks.map(lambda _: gpus.free_gpus_of_world(), range(4))]
    assert (lists, len(looks)) == ([[3, 1]] * 4, 1)
    monkeypatch.setattr(gpus, "local_world_id", lambda: "another")
    assert gpus.free_gpus_of_world() == [3, 2]  # another world looks anew
    [path] = tmp_path.glob("*/gpus-another")
    written = json.loads(path.read_text())
    path.write_text(json.dumps({**written, "process": {**written["process"], "began": 1}}))
    assert gpus.free_gpus_of_world() == [3, 3], "what a killed process of an earlier world has left"


@pytest.mark.parametrize("poisoned", [False, True])
def test_a_fork_tells_whether_forks_can_use_cuda(poisoned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "is_in_bad_fork", lambda: poisoned)
    assert gpus.fork_cannot_use_cuda() is poisoned


def test_a_trainer_of_precision_16_does_not_ask_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: asked.append(True) or False)
    precision = Precision("16", torch.device("cuda"))
    assert precision.module_errors(by_hand=True)
    assert asked == []
    with pytest.warns(UserWarning, match="CUDA is not available"):
        precision.state_dict()  # in a rank
    assert asked


class OtherRanks(SingleProcess):
    """Ranks on this machine that have the GPUs of these UUIDs; of none, the CPU."""

    def __init__(self, *others: str) -> None:
        self.others = others

    def gather(self, value: object) -> list[Any]:
        host = socket.gethostname()
        return [value, *((host, "cuda" if uuid else "cpu", [uuid] if uuid else []) for uuid in self.others)]


@pytest.mark.parametrize(
    ("device", "others", "refused"),
    [
        ("cuda", ["b"], ""),
        ("cuda", ["a"], "ranks 0 and 1 were both given GPU a"),
        ("cuda", ["b", "b"], "ranks 1 and 2 were both given GPU b"),
        ("cuda", ["b", ""], "rank 0 on .* has the device cuda, and rank 2 on .* has cpu: all need the same"),
        ("cpu", ["", "b"], "rank 0 on .* has the device cpu, and rank 2 on .* has cuda: all need the same"),
        ("cpu", [""], ""),
    ],
    ids=str,
)
def test_devices_that_do_not_match_are_refused(device: str, others: list[str], refused: str) -> None:
    strategy = Ddp()
    strategy.collective = OtherRanks(*others)
    strategy.attach(World(size=1 + len(others)), [torch.device(device)])
    with pytest.raises(JobError, match=refused) if refused else nullcontext():
        ensure_devices(strategy, lambda _: "a")
