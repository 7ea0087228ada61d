"""For tests: does this module resume exactly? Do a strategy, a store, a launcher keep their laws?

`assert_resumes_exactly(Classifier, Digits)` is a whole test.

    resume_check     a run cut off at several positions, compared with one that was not
    child_run        one attempt in a process of its own
    batch_journal    what stood in each batch
    nondeterminism   where user code asks clocks and the like
    ranks            functions called in worlds of fresh processes
    disable_gc       what those processes share is imported without collections
    freeze_gc        what those processes share is not collected
    laws             classes of tests for authors of strategies, stores and launchers
"""

from midstride.engine.fault_injection import PHASES, Fault, FaultPlan
from midstride.engine.testing.ranks import run_ranks
from midstride.engine.testing.resume_check import assert_resumes_exactly, final_state

__all__ = ["PHASES", "Fault", "FaultPlan", "assert_resumes_exactly", "final_state", "run_ranks"]
