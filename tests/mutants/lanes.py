"""Bugs in what makes a run in lanes that of any number of ranks."""

from mutants.mutant import Mutant

__all__ = ["LANES"]

LAWS = "laws/test_lanes.py::test_any_number_of_ranks_computes_the_same_run"
ENDED = "laws/test_lanes.py::test_a_run_that_ended_is_taken_up_by_more_ranks_that_have_nothing_left_to_do"
CHANGED = "laws/test_lanes.py::test_what_depends_on_the_lanes_of_a_rank_is_refused_on_any_number_of_them"

LANES = [
    Mutant(
        "ranks add up their sums one after the other",
        "engine/lanes.py",
        "        pairs = [(leaves[i], leaves[i + 1]) for i in range(0, len(leaves), 2)]",
        "        pairs = [(leaves[0], leaf) for leaf in leaves[1:]]",
        f"{LAWS}[recurrent]",
    ),
    Mutant(
        "a lane goes on from the buffers of the one before",
        "engine/strategies/ordered_reducer.py",
        "        if self._before:\n            foreach_copy_(self._tensors(), self._before)",
        "        if self._before and False:\n            foreach_copy_(self._tensors(), self._before)",
        f"{LAWS}[dropout]",
    ),
    Mutant(
        "buffers are added up before they are scaled",
        "engine/strategies/ordered_reducer.py",
        "bucket.deposit(number, foreach_mul([tensors[i] for i in indices], 1 / self._lanes.count))",
        "bucket.deposit(number, [tensors[i] for i in indices])",
        f"{LAWS}[convolutions]",
    ),
    Mutant(
        "a lane that has no gradient is left out, and an optimizer sees a zero",
        "engine/strategies/ordered_reducer.py",
        "            return [True] * len(self.sums)\n        return [bool(lanes)",
        "            return [True] * len(self.sums)\n        return [True or bool(lanes)",
        f"{LAWS}[unused]",
    ),
    Mutant(
        "the gradients of a window are where the next batch is added up",
        "engine/strategies/ordered_reducer.py",
        "None if parameter.grad is None else parameter.grad.clone()",
        "parameter.grad",
        f"{LAWS}[windows]",
    ),
    Mutant(
        "random numbers are those of the rank",
        "engine/training/lane_scope.py",
        "        self._reseed(*position, lane)\n",
        "",
        f"{LAWS}[dropout]",
    ),
    Mutant(
        "hooks draw from where the last lane left the generators",
        "engine/training/lane_scope.py",
        "        self._reseed(*position, self._lanes.count)",
        "        pass",
        f"{LAWS}[watched]",
    ),
    Mutant(
        "what a hook logs counts once for each rank",
        "engine/metrics/lane_logger.py",
        "            for lane in self._lanes.own if whole is None else whole:",
        "            for lane in self._lanes.own[:1]:",
        f"{LAWS}[watched]",
    ),
    Mutant(
        "what a hook of a batch logs counts for lanes without one, too",
        "engine/metrics/lane_logger.py",
        "own if whole is None else whole:\n                self.batch = whole and whole[lane]",
        "own:\n                self.batch = whole",
        f"{LAWS}[watched]",
    ),
    Mutant(
        "the hook of a batch's end draws from where the last lane left the generators, in an evaluation",
        "engine/training/evaluation.py",
        "        self.lanes.end_batch(self.context.progress.step, number, index, 1)\n",
        "",
        f"{LAWS}[watched]",
    ),
    Mutant(
        "of a run that ended, the first lane of each rank alone says so",
        "engine/metrics/lane_logger.py",
        "            rows.close()\n            rows.drop_closed()",
        "            rows.drop_closed()",
        ENDED,
    ),
    Mutant(
        "a metric goes on with what another lane has seen",
        "engine/metrics/lane_metrics.py",
        "        self._load_seen(self._seen[lane])\n        try:",
        "        try:",
        f"{LAWS}[watched]",
    ),
    Mutant(
        "a reset outside a lane is that of the last one",
        "engine/metrics/lane_metrics.py",
        "            if self._lane is None:",
        "            if False:",
        f"{LAWS}[watched]",
    ),
    Mutant(
        "another CPU goes on as if nothing had changed",
        "engine/training/checkpointing/identity.py",
        '_SUM_KEYS = ("threads", "cpu",',
        '_SUM_KEYS = ("threads",',
        "unit/training/test_lane_refusals.py::test_sums_that_are_computed_in_another_way_are_refused",
    ),
    Mutant(
        "an attribute that a step changes now and then goes unseen",
        "engine/training/lane_scope.py",
        "(names or self._lanes_run.bit_count() == 1)",
        "self._lanes_run.bit_count() == 1",
        f"{CHANGED}[Cools-1]",
    ),
    Mutant(
        "of a step that is tried again the same batch is taken",
        "engine/training/lane_scope.py",
        "partial(step, self._other[1])",
        "partial(step, batch)",
        f"{CHANGED}[Remembers-4]",
    ),
    Mutant(
        "a buffer that an evaluation changes depends on the rank",
        "engine/training/lane_scope.py",
        "nullcontext() if self._restore_buffers else self._unchanged_buffers()",
        "nullcontext()",
        f"{CHANGED}[CountsInValidation-2]",
    ),
    Mutant(
        "a step that is tried again begins with the buffers that the lane left",
        "engine/training/lane_scope.py",
        "                self._restore_buffers()",
        "                pass",
        f"{LAWS}[derived]",
    ),
    Mutant(
        "what a lane that is tried again lets metrics see stays",
        "engine/training/lane_scope.py",
        "side_effects_reverted(context.module, generators), self._logged.muted()",
        "side_effects_reverted(context.module, generators)",
        f"{LAWS}[watched]",
    ),
]
