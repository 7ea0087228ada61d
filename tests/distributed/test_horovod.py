"""The strategy horovod by its parts, in a world of three."""

import faulthandler
import itertools
import json
import math
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from laws.horovod_world import needs_horovod, run_horovod_ranks
from laws.lives import SampleData, Tangled
from support.limit import LIMIT_S
from torch import nn
from torch.optim import SGD, lr_scheduler

from midstride.engine import Trainer, TrainingModule
from midstride.engine.errors import StrategyUnavailable, UserError, WorldError
from midstride.engine.launch.launchers.build import build_launcher
from midstride.engine.session.heartbeat import Heartbeat
from midstride.engine.strategies.build_strategy import build_strategy
from midstride.engine.strategies.step import TrainingStep
from midstride.engine.world import World


def here(**options: Any) -> Any:
    strategy = build_strategy("horovod", options)
    strategy.attach(World.from_environment(), [torch.device("cpu")])
    strategy.init_process_group()
    return strategy


def exchange(folder: str) -> None:
    strategy = here()
    rank = strategy.world.rank
    ranks = range(strategy.world.size)
    values = [None, {"of": torch.ones(2, 3)}, "a" * 10_000]  # of other types and lengths on each rank
    assert str(strategy.collective.gather(values[rank])) == str(values)
    assert [strategy.collective.all_agree(rank != other) for other in (0, 2, 7)] == [False, False, True]
    channel = strategy.collective.side_channel()
    assert channel.gather(rank) == list(ranks)
    store = strategy.collective.key_value_store()
    store.set(f"{rank}", "here")
    store.wait([f"{other}" for other in ranks])

    everywhere, on_one, nowhere, frozen = (nn.Parameter(torch.zeros(2, 2, dtype=d)) for d in DTYPES)
    frozen.requires_grad_(False)
    everywhere.grad = torch.full((2, 2), float(rank))
    on_one.grad = torch.full((2, 2), 3.0, dtype=on_one.dtype) if rank == 1 else None
    strategy.reduce_gradients([everywhere, on_one, nowhere, frozen])
    assert torch.equal(everywhere.grad, torch.ones(2, 2))
    assert torch.equal(on_one.grad, torch.ones(2, 2, dtype=on_one.dtype))
    assert nowhere.grad is None
    assert frozen.grad is None
    store.set(f"done-{rank}", "")
    if rank == 0:  # it keeps the store, and leaves when no rank waits there any more
        store.wait([f"done-{other}" for other in ranks])


DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float32)


def test_what_ranks_exchange(tmp_path: Path) -> None:
    assert run_horovod_ranks(exchange, str(tmp_path), processes=3) == [0, 0, 0]


def scale(folder: str) -> None:
    factors: dict[str, Any] = {}
    for scaled in (True, False):
        strategy = here(scale_lr=scaled)
        optimizer = SGD(nn.Linear(1, 1).parameters(), lr=0.5)
        scheduler = lr_scheduler.StepLR(optimizer, 1)
        strategy.setup_optimizers([optimizer], [scheduler])
        factors[str(scaled)] = [optimizer.param_groups[0]["lr"], *scheduler.base_lrs, strategy.state_dict()]
        # A later life keeps what the first one had, whatever it would choose itself.
        strategy.load_state_dict({"learning_rate_factor": 7})
        assert strategy.state_dict() == {"learning_rate_factor": 7}
    Path(folder, os.environ["HOROVOD_RANK"]).write_text(json.dumps(factors))


def test_learning_rates_grow_with_the_world(tmp_path: Path) -> None:
    assert run_horovod_ranks(scale, str(tmp_path), processes=2) == [0, 0]
    for rank in (0, 1):
        assert json.loads((tmp_path / str(rank)).read_text()) == {
            "True": [1.0, 1.0, {"learning_rate_factor": 2}],
            "False": [0.5, 0.5, {"learning_rate_factor": 1}],
        }


class Uneven(TrainingModule):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        with torch.no_grad():
            self.layer.weight.fill_(float(rank == 1))


def start_unevenly(folder: str) -> None:
    strategy = here()
    module, scope = Uneven(strategy.world.rank), SimpleNamespace(heartbeat=Heartbeat(), call=print)
    with pytest.raises(UserError, match=r"ranks \d and \d start from different values of layer.weight"):
        strategy.wrap(
            TrainingStep(module, scope, strategy.step_call(scope, module, "training_step")), one_backward=True
        )


def test_ranks_that_start_differently_are_refused(tmp_path: Path) -> None:
    assert run_horovod_ranks(start_unevenly, str(tmp_path), processes=3) == [0, 0, 0]


def fit_twice(folder: str) -> None:
    module = Tangled()  # its batch statistics are each rank's own, and differ after the first fit
    for _ in range(2):
        trainer = Trainer(max_steps=2, snapshots=None, enable_progress_bar=False)
        trainer.fit(module, SampleData(2, 0))
        assert trainer.progress.step == 2
    assert math.isfinite(trainer.validate(module, SampleData(2, 0))["val/loss"])


def test_a_module_is_fitted_again(tmp_path: Path) -> None:
    assert run_horovod_ranks(fit_twice, str(tmp_path), processes=2) == [0, 0]


def ask_what_is_never_answered(folder: str) -> None:
    strategy = here()
    collective, channel = strategy.collective, strategy.collective.side_channel()
    assert channel.gather(1) == [1, 1]
    asked = Path(folder, "asked")
    if strategy.world.rank == 1:
        while not asked.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    def never(handle: int) -> bool:
        asked.touch()
        return False

    with patch("horovod.torch.poll", never):  # as of what was asked for while Horovod ended
        with pytest.raises(WorldError, match="Horovod has ended"):
            channel.gather(1)
        with pytest.raises(WorldError, match="Horovod has been shut down"):
            collective.gather(1)


def test_no_rank_waits_after_horovod_has_ended(tmp_path: Path) -> None:
    assert run_horovod_ranks(ask_what_is_never_answered, str(tmp_path), processes=2) == [0, -9]


def ask_on_and_on(folder: str) -> None:
    collective = here().collective
    assert collective.gather(1) == [1, 1]
    if int(os.environ["HOROVOD_RANK"]) == 1:
        while not Path(folder, "asked").exists():
            time.sleep(0.01)
        Path(folder, "ends").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    # Where Python's lock is held for ever, no thread of Python ends this process.
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    begun: list[Any] = []

    def ask() -> None:
        for number in itertools.count():
            begun.append(collective.start_mean(torch.zeros(4), f"mean/{number}"))
            Path(folder, "asked").touch()

    with pytest.raises(WorldError, match="Horovod has been shut down"):
        ask()
    for mean in begun:
        with pytest.raises(WorldError, match="Horovod has"):
            mean.wait()
    with pytest.raises(WorldError, match="Horovod has been shut down"):
        collective.gather(1)
    faulthandler.cancel_dump_traceback_later()


def test_a_request_while_horovod_ends_is_no_deadlock(tmp_path: Path) -> None:
    codes = run_horovod_ranks(ask_on_and_on, str(tmp_path), processes=2)
    assert Path(tmp_path, "ends").exists()
    assert codes == [0, -9]


class Unsuited(TrainingModule):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(3, 2, sparse=True)
        self.phase = nn.Parameter(torch.zeros(1, dtype=torch.complex64))


class TwoThreads:
    """Gathers of two threads. `has_moved` is set once rank 0 is in its second one."""

    def __init__(self) -> None:
        self.values, self.met = [None, None], threading.Barrier(2, timeout=LIMIT_S)
        self.has_moved, self.gathers = threading.Event(), 0

    def gather(self, rank: int, value: Any) -> list[Any]:
        self.gathers += rank == 0
        if self.gathers == 2:
            self.has_moved.set()
        self.values[rank] = value
        self.met.wait()
        found = [*self.values]
        self.met.wait()
        return found


@needs_horovod
@pytest.mark.parametrize("is_reachable", [True, False])
def test_rank_0_serves_its_store_until_all_have_connected(is_reachable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from midstride.engine.strategies import horovod

    threads, returned = TwoThreads(), list[int]()

    def store(host: str, port: int, is_master: bool, **options: Any) -> Any:
        assert is_master or threads.has_moved.wait(LIMIT_S)
        if not is_master and (returned or not is_reachable):
            raise dist.DistNetworkError("no one listens")
        return SimpleNamespace(port=7)

    def open_store(rank: int) -> str:
        collective: Any = horovod.HorovodCollective()
        collective._rank, collective.gather = rank, partial(threads.gather, rank)
        try:
            collective._open_store()
        except WorldError as error:
            return str(error)
        finally:
            returned.append(rank)
            threads.has_moved.set()
        return "connected"

    monkeypatch.setattr(horovod, "TCPStore", store)
    with ThreadPoolExecutor(2) as ranks:
        found = [*ranks.map(open_store, range(2))]
    refused = "rank 1 could not connect to the store of rank 0 at localhost:7: no one listens"
    assert found == ["connected" if is_reachable else refused] * 2


@needs_horovod
def test_what_cannot_be_summed_is_named() -> None:
    sparse, wave = build_strategy("horovod").module_errors(Unsuited())
    assert "words has sparse gradients" in sparse
    assert "phase is complex" in wave


def test_without_horovod_the_launcher_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("midstride.engine.launch.launchers.horovodrun.find_spec", lambda name: None)
    with pytest.raises(StrategyUnavailable, match="make horovod"):
        build_launcher("horovodrun", ".")
