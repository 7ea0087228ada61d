"""Bugs in strategy horovod: what is waited for without end when a rank falls silent or ends."""

from mutants.mutant import Mutant

__all__ = ["HOROVOD"]

PARTS = "distributed/test_horovod.py"

HOROVOD = [
    Mutant(
        "Horovod is waited for without end",
        "engine/strategies/horovod.py",
        "        self._timeout_s = timeout_s\n",
        "",
        "distributed/test_parts.py::test_a_rank_that_falls_silent_is_named_within_the_collective_timeout[horovod-run_horovod_ranks]",
    ),
    Mutant(
        "what Horovod does not answer any more is waited for",
        "engine/strategies/horovod.py",
        "if self._loop is not None and not self._loop.exists()",
        "if False and not self._loop.exists()",
        f"{PARTS}::test_nothing_is_waited_for_when_horovod_has_ended_with_a_rank",
    ),
    Mutant(
        "Horovod drops the last reference to a tensor under its lock",
        "engine/strategies/horovod.py",
        "        reference.grad = tensor\n",
        "",
        f"{PARTS}::test_asking_while_horovod_ends_with_a_rank_is_no_deadlock",
    ),
    Mutant(
        "what Horovod sums up to tell ranks' values apart is read as far as it is padded",
        "engine/strategies/horovod.py",
        "data.view(torch.uint8)[:total]",
        "data.view(torch.uint8)",
        f"{PARTS}::test_what_ranks_exchange",
    ),
]
