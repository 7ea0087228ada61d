"""Which devices are meant: the tables of GPUs, devices and cores; which are free, and whose each is."""

import json
import socket
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
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

#: on a machine with four
GPUS = [
    (None, []),
    (0, []),
    (3, [0, 1, 2]),
    (-1, [0, 1, 2, 3]),
    ([0], [0]),
    ([1, 3], [1, 3]),
    ("0", [0]),
    ("3", [3]),
    ("1, 3", [1, 3]),
    ("-1", [0, 1, 2, 3]),
]
WRONG = [0.1, -2, False, True, [-1], [None], ["0"], [0, 0], "a", [4], 5, "4", "1, 9", [], "", "0, 0", "-2", [True], {}]


@pytest.mark.parametrize(("given", "meant"), GPUS, ids=lambda value: repr(value))
def test_gpus_mean_what_the_table_says(given: Any, meant: list[int]) -> None:
    assert parse_gpus(given, available=4) == meant


@pytest.mark.parametrize("given", WRONG, ids=repr)
def test_other_gpus_are_refused_with_what_was_given_and_what_is_there(given: Any) -> None:
    with pytest.raises(ValueError) as caught:
        parse_gpus(given, available=4)
    assert f"gpus={given!r}" in str(caught.value)
    assert "there are GPUs 0 to 3 here" in str(caught.value)


@pytest.mark.parametrize("given", [1, -1, [0], "0"], ids=repr)
def test_gpus_on_a_machine_without_are_refused(given: Any) -> None:
    with pytest.raises(JobError, match="there is no GPU here") as caught:
        Trainer(gpus=given)
    assert f"gpus={given!r}" in str(caught.value)


@pytest.mark.parametrize(
    ("given", "available", "meant"),
    [
        (None, 0, ([], 1)),
        (None, 4, ([0], 1)),
        ("auto", 0, ([], 1)),
        ("auto", 2, ([0, 1], 2)),
        (3, 0, ([], 3)),
        (3, 4, ([0, 1, 2], 3)),
        ([1, 3], 4, ([1, 3], 2)),
        (-1, 4, ([0, 1, 2, 3], 4)),
    ],
)
def test_devices_count_on_the_cpu_where_there_is_no_gpu(given: Any, available: int, meant: Any) -> None:
    assert parse_devices(given, available) == meant


@pytest.mark.parametrize("given", ["2", 0, -1, -3, True, 1.0, [0], "all"], ids=repr)
def test_other_devices_are_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="there is no GPU here") as caught:
        parse_devices(given, available=0)
    assert f"devices={given!r}" in str(caught.value)


@pytest.mark.parametrize(("given", "meant"), [(1, (1, None)), (8, (8, None)), ("8", (8, None)), ([5], (1, 5))])
def test_cores_of_a_tpu_are_a_number_or_an_index(given: Any, meant: Any) -> None:
    assert parse_tpu_cores(given) == meant


@pytest.mark.parametrize("given", [0, 2, -1, True, 8.0, "5", "[5]", "all", [], [8], [-1], [1, 2], ["1"], {}], ids=repr)
def test_other_cores_of_a_tpu_are_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="1 or 8 of them are needed, or a list with the index of one") as caught:
        parse_tpu_cores(given)
    assert f"tpu_cores={given!r}" in str(caught.value)


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
def test_devices_that_cannot_train_together_are_refused_when_ranks_meet(
    device: str, others: list[str], refused: str
) -> None:
    strategy = Ddp()
    strategy.collective = OtherRanks(*others)
    strategy.attach(World(size=1 + len(others)), [torch.device(device)])
    with pytest.raises(JobError, match=refused) if refused else nullcontext():
        ensure_devices(strategy, lambda _: "a")
