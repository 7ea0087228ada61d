"""Tests for users: exact resume of a module, and contracts of strategies, stores, launchers.

`assert_resumes_exactly(Classifier, Digits)` is a whole test.

    resume_check     a run cut off at several positions, compared with one that was not
    child_run        one attempt in a process of its own
    batch_journal    digests of the samples of each batch
    ranks            functions called in worlds of new processes
    disable_gc       pauses the garbage collector while modules for these processes are imported
    freeze_gc        excludes these modules from garbage collection
    laws             classes of tests for authors of strategies, stores and launchers

Tests: tests/unit/testing
"""

from midstride.engine.fault_injection import PHASES, Fault, FaultPlan
from midstride.engine.testing.ranks import run_ranks
from midstride.engine.testing.resume_check import assert_resumes_exactly, final_state

__all__ = ["PHASES", "Fault", "FaultPlan", "assert_resumes_exactly", "final_state", "run_ranks"]
