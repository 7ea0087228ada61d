"""Planted bugs in loops of the user's own."""

from mutants.mutant import Mutant

# fmt: off
LOOPS = [
    Mutant("code before the first batch of a resumed pass has its effects twice", "Attempt.lead",
        "self._restore_again()", "pass",
        "test_a_killed_loop_ends_as_undisturbed[epochs-one process-validation]"),
    Mutant("an enumerate counts from 0 in a resumed pass", "continue_wrappers",
        "_advance(wrapper, done)", "pass",
        "test_a_killed_loop_ends_as_undisturbed[epochs-one process-validation]"),
    Mutant("a DDP of the user's own sums gradients in a new order", "GradientOrder.load_state_dict",
        "wrapped().backward()", "pass",
        "test_a_killed_loop_ends_as_undisturbed[epochs-own DDP-backward]"),
    Mutant("a zipped loader begins a new pass", "Feed.claim",
        "return claimed", "return False",
        "test_a_killed_loop_ends_as_undisturbed[two loaders-one process-forward]"),
    Mutant("a break does not end the run", "Loop._call",
        "left_by_break()", "False",
        "test_a_loop_left_by_break_is_over"),
    Mutant("a variable that is read after a loop counts as carried", "_Flow.live_after",
        "live[end] - self.assigned_by(at)", "live[end]",
        "test_carried_and_read_after"),
    Mutant("accelerate does not step on the last batch of an epoch", "Feed.batches",
        "seen.returns(is_last=self.at_end)", "pass",
        "test_a_prepared_loop_resumes_exactly[accelerate]"),
    Mutant("a script that disagrees with its job is not told", "ScriptJob.arguments",
        "self._disagreements(given, default)", "[]",
        "test_a_disagreement_shows_both_values"),
    Mutant("the last window of a resumed epoch takes no step", "Resumable._run_epoch",
        "steps_in_epoch - done * self._window", "steps_in_epoch",
        "test_a_trainer_of_transformers_resumes_exactly[a causal LM, windows of three batches]"),
    Mutant("the sums of a Trainer begin anew in each attempt", "TrainerParts.load_again",
        "self.load_state_dict(self._loaded)", "pass",
        "test_a_trainer_of_transformers_resumes_exactly"),
]
# fmt: on
