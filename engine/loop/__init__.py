"""`Loop`: exact resume for training loops of the user's own.

attempt    one attempt of a loop: restored, then told of each batch, each epoch and the end
feeds      the loaders of a loop: each counts its passes and batches
frames     the frames of a script: which one iterates over a loop, and how it leaves it
kept       the objects that a loop keeps
liveness   live variables: those that an iteration leaves to the next one, by bytecode
loop       `Loop`, which scripts use
replay     follows the plan of a replay up to a step
script_job  the job that runs a script, and what its `Loop` takes from it
state      the state of a loop: its parts, and the facts that each snapshot repeats
variables  names the variables of a script that change in training and that no snapshot holds
wrappers   wrappers of a loop's loader, such as `enumerate`: continued in a resumed pass, or refused

Tests: tests/unit/loop, tests/laws/test_loops.py
"""
