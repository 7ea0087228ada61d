"""Strategies by name: their rows, and what is said of one that is not here."""

import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.refused import fit
from torch import nn

from midstride.engine import TrainingModule
from midstride.engine.config.options import TrainerOptions
from midstride.engine.config.strategies import STRATEGIES, conflicts
from midstride.engine.config.strategy_spec import StrategyRequest
from midstride.engine.errors import JobError, StrategyUnavailable, UserCodeError, UserError
from midstride.engine.strategies.base import Strategy
from midstride.engine.strategies.build_strategy import build_strategy
from midstride.engine.strategies.ddp import Ddp
from midstride.engine.strategies.single import Single
from midstride.engine.training.trainer import Trainer
from midstride.engine.world import World


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_row_names_the_options_of_its_class_or_what_it_needs(name: str) -> None:
    row = STRATEGIES[name]
    options: dict[str, Any] = {option: False if kind is bool else None for option, kind in row.options.items()}
    try:
        found = build_strategy(name, options).name in STRATEGIES
    except StrategyUnavailable as error:
        found = row.remedy in str(error)
    assert found
    assert not all(conflicts(StrategyRequest(name, ranks=ranks)) for ranks in (1, 2))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("dpp", "no strategy 'dpp': choose one of ddp"),
        ("deepspeed", "no strategy 'deepspeed' here: use sharded or fully_sharded"),
        ("nowhere:Ddp", "needs nowhere"),
        ("torch:Ddp2", "Ddp2 is not in torch; a class is needed that inherits midstride.engine.Strategy"),
        ("torch.nn:ReLU", "ReLU is <class 'torch.nn.modules.activation.ReLU'>; a class is needed that inherits"),
        ("torch:nn", "nn is <module 'torch.nn' .*; a class is needed that inherits"),
    ],
)
def test_a_strategy_that_is_not_there_says_what_to_do(name: str, words: str) -> None:
    with pytest.raises(StrategyUnavailable, match=words):
        Trainer(strategy=name)


OWN = """
from midstride.engine.strategies.single import Single


class Wide(Single):
    def __init__(self, width):
        super().__init__()
        self.halves = width // 2
"""
UNWRITTEN = """
from midstride.engine import Strategy


class Wide(Strategy):
    def wrap(self, step):
        return step
"""
UNBUILT = """
from midstride.engine.strategies.mixins import ReplicatesParameters


class Wide(ReplicatesParameters):
    def __init__(self):
        pass

    def reduce_gradients(self, parameters):
        pass
"""


@pytest.mark.parametrize(
    ("code", "arguments", "kind", "words"),
    [
        (OWN, {"widht": 3}, JobError, r"strategy_args.widht: \S+ takes no 'widht', did you mean 'width'"),
        (OWN, {}, JobError, r"strategy_args.width: is missing; \S+ needs it"),
        (OWN, {"width": "3"}, UserCodeError, r"TypeError: unsupported operand .*\s+raised in building"),
        ("import math\nmath.nothing", {}, UserCodeError, r"AttributeError: .* 'nothing'\s+raised in import of"),
        (UNWRITTEN, {}, JobError, r"has no is_replicated: write is_replicated\(self, path\)\n.*\n.*wrap\(self, step\)"),
        (UNBUILT, {}, JobError, r'no name: write name = "\.\.\." in the class\n.*call super\(\).__init__\(TorchColl'),
    ],
    ids=["mistyped", "missing", "raises", "import", "unwritten", "unbuilt"],
)
def test_a_fault_in_a_strategy_of_your_own_is_named(
    code: str,
    arguments: dict[str, Any],
    kind: type[Exception],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "own_strategy.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_strategy", raising=False)
    with pytest.raises(kind, match=words):
        Trainer(strategy="own_strategy:Wide", strategy_args=arguments)


class OtherWrap(Single):
    def wrap(self, step: Any) -> Any:  # type: ignore[override]
        return step


class WrapsNothing(Single):
    def wrap(self, step: Any, *, one_backward: bool) -> Any:
        return None


class FailsToWrap(Single):
    def wrap(self, step: Any, *, one_backward: bool) -> Any:
        raise LookupError("no wrapper")


@pytest.mark.parametrize(
    ("strategy", "kind", "words"),
    [
        (OtherWrap(), JobError, r"OtherWrap.wrap\(self, step\) is called as wrap\(self, step, \*, one_backward\)"),
        (WrapsNothing(), UserError, "WrapsNothing.wrap returned None: return the step, or a module around it"),
        (FailsToWrap(), UserCodeError, r"LookupError: no wrapper\s+raised in FailsToWrap.wrap"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_own_strategy_without_wrap_is_named_before_step_1(
    strategy: Strategy, kind: type[Exception], words: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=words):
        fit(tmp_path / "run", strategy=strategy)


def test_a_single_process_collective_with_two_ranks_is_named() -> None:
    strategy = Single()
    strategy.attach(World(size=2, local_size=2), [torch.device("cpu")])
    (said,) = strategy.module_errors(TrainingModule())
    assert said.startswith("Single has the collective of a single process, and this world has 2 processes: write super")


SPARSE = TrainingModule()
SPARSE.words = nn.Embedding(3, 2, sparse=True)


def test_sparse_gradients_by_hand_are_refused_under_ddp() -> None:
    with pytest.raises(UserError, match=r"the module's words has sparse gradients, with several .* sparse=False"):
        Ddp().wrap(Mock(module=SPARSE), one_backward=False)


class ZeroRedundancyOptimizer(torch.optim.SGD):
    """Called as torch's, which needs a process group."""


#: options of the strategy, of the Trainer, the optimizer -> words
OF_DDP: dict[str, tuple[dict[str, Any], dict[str, Any], Any, list[str]]] = {
    "a static graph over windows": (
        {"static_graph": True},
        {"accumulate_grad_batches": 2},
        torch.optim.SGD,
        ["static_graph with accumulate_grad_batches=2", "leave static_graph out"],
    ),
    "state on each rank": ({}, {}, ZeroRedundancyOptimizer, ["ZeroRedundancyOptimizer", "strategy sharded"]),
    "neither": ({"static_graph": True}, {}, torch.optim.SGD, []),
}


@pytest.mark.parametrize("case", OF_DDP)
def test_what_ddp_cannot_is_named(case: str) -> None:
    strategy, options, optimizer, words = OF_DDP[case]
    made = optimizer([nn.Parameter(torch.ones(1))], lr=0.1)
    said = Ddp(**strategy).fit_errors([made], TrainerOptions(**options), 4)
    assert len(said) == bool(words)
    assert all(word in line for line in said for word in words)


def test_options_of_ddp_that_have_no_effect_by_hand_are_refused() -> None:
    strategy, step = Ddp(comm_hook="fp16_compress", bucket_cap_mb=1), Mock(module=TrainingModule())
    with pytest.raises(UserError, match=r"comm_hook has no effect with several optimizers or .*: leave it out"):
        strategy.wrap(step, one_backward=False)


def test_a_library_that_is_missing_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_xla", None)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)  # a script; a worker is none
    with pytest.raises(StrategyUnavailable, match=r"'xla' needs torch_xla, not installed here: install .*torch_xla\["):
        Trainer(tpu_cores=8)
