"""Ranks of torch's agent are forks of it, but for those that could not use their GPU then."""

import sys
from collections.abc import Callable
from typing import Any

import pytest

from midstride.engine.launch import elastic_ranks

MODULE = "json.tool"
RANK = (sys.executable, "-u", "-m", MODULE)
#: command of a rank, whether a fork could use CUDA -> whether it is forked
CASES = {
    "a rank": (RANK, True, True),
    "CUDA has been asked": (RANK, False, False),
    "bound to a NUMA node": (("numactl", *RANK), True, False),
    "another module": ((*RANK[:3], "json"), True, False),
}


class Fork:
    """What is made for a rank that is forked."""

    def __init__(self, main: Callable[[], None], environment: dict[str, str]) -> None:
        self.environment = environment


@pytest.mark.parametrize("case", CASES)
def test_a_rank_that_could_not_use_its_gpu_is_started_afresh(case: str) -> None:
    command, can_use_cuda, is_forked = CASES[case]

    def given(start: Callable[..., Any]) -> Any:
        return start

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        patch.setattr(elastic_ranks, "preload", lambda *modules: None)
        patch.setattr(elastic_ranks, "ranks_started_by", given)
        patch.setattr(elastic_ranks, "ForkedProgram", Fork)
        patch.setattr(elastic_ranks, "fork_cannot_use_cuda", lambda: not can_use_cuda)
        start: Any = elastic_ranks.ranks_forked(MODULE)
        started = start(command, {"RANK": "0"})
    assert (started is not None) == is_forked
    assert started is None or started.environment == {"RANK": "0"}
