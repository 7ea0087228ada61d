"""Checkpointing: the state of a run between two batches, in snapshots and restored.

A fit and a loop are its users: each gives a context and a `RunState`.

boundary       the boundary between two batches: takes due snapshots, and handles requests
checkpointer   takes the snapshots of a run, and resumes from them
context        the objects that any training uses between two batches
determinism    deterministic algorithms of torch, switched on while a run is recorded
finite_losses  checks that losses are finite, before anything that depends on them is written
gradients      the gradients within an accumulation window
hook_changes   names hooks that change a training while a snapshot is taken
identity       changes between two attempts of a run: refused, warned about, or ignored
rank_warnings  warnings of all ranks, merged and logged by rank 0
replica_check  checks that tensors that a snapshot holds once are the same on all ranks
reporter       sends events to the launcher, or shows them on the terminal
restore_check  restores every part from its own state, to find early what could not be restored later
roots          roots of a run's object graph: data, samplers, loaders, optimizers, schedulers, generators in globals
run_state      the state of a run as the checkpointer sees it: named parts, loaders, facts
run_store      the folder of a run as one attempt uses it: snapshots, weights, metric log, lease
sample_log     the log of samples: the trained batches of each epoch, over all attempts of a run
settings       settings that a snapshot overrides: warnings, and taking the new ones
step_trace     digests of the steps of a replay, by which two runs are compared
text_order     warns of sets of strings: without PYTHONHASHSEED their order differs in each interpreter
unsaved_state  warns of user state that changes in training and that no snapshot holds
world_size     resuming with another number of ranks: batches are divided anew, states merged

Tests: tests/unit/checkpointing, tests/laws/test_resume.py, tests/faults/test_one_writer.py
"""
