"""Faults on purpose: each kind strikes once, and a plan that did not strike is told."""

import os
from pathlib import Path

import pytest
from laws.lives import Setting, live
from laws.modules import Manual

from midstride.engine.fault_injection import PHASES, FaultPlan, InjectedFault
from midstride.engine.testing import run_ranks


def reach(step: int) -> None:
    plan = FaultPlan.from_environment()
    assert plan is not None
    plan.at(rank=0, step=step, phase="forward")


@pytest.mark.parametrize(("kind", "code"), [("kill", -9), ("raise", 1)])
def test_a_fault_strikes_once(kind: str, code: int, tmp_path: Path) -> None:
    plan = FaultPlan(tmp_path).add(kind, step=3, phase="forward")
    environment = {**os.environ, **plan.environment}
    assert run_ranks(reach, 2, environment=environment) == [0]
    with pytest.raises(AssertionError, match="never struck"):
        plan.assert_all_fired()
    assert run_ranks(reach, 3, environment=environment) == [code]
    plan.assert_all_fired()
    assert run_ranks(reach, 3, environment=environment) == [0]


def test_a_hanging_rank_is_found_by_its_limit(tmp_path: Path) -> None:
    plan, limit_s = FaultPlan(tmp_path).add("hang", step=0, phase="forward"), 1.0
    while not plan.fired():  # a busy machine may need longer to start the rank
        with pytest.raises(TimeoutError, match=rf"ranks \[0\] of 1 did not end within {limit_s} s"):
            run_ranks(reach, 0, environment={**os.environ, **plan.environment}, timeout_s=limit_s)
        limit_s *= 2


#: by hand, optimizers step out of the engine's sight; other modules die at each phase in `test_resume`
@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase != "optimizer_step"])
def test_a_fault_strikes_at_every_phase_of_steps_by_hand(phase: str, tmp_path: Path) -> None:
    plan = FaultPlan(tmp_path).add("raise", step=2, phase=phase)
    assert live(Setting(module=Manual), tmp_path, plan) == [1]
    plan.assert_all_fired()


def test_an_unknown_phase_lists_the_known(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no phase 'lunch': choose one of fetch, forward"):
        FaultPlan(tmp_path).add("kill", step=1, phase="lunch")
    assert issubclass(InjectedFault, RuntimeError)
