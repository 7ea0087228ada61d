"""One attempt at a run, as its launcher and its ranks see it. Needs no torch.

agreement       how the ranks agree on the next boundary that all of them can still reach
attempts        the log of a run's attempts, one file each, and the decision whether to try again
events          what happens in a world: one JSON line per event, in a local file that the launcher reads
heartbeat       what a rank is doing, in shared memory that its launcher reads
lasting_output  standard output that a closed pipe or a full disk does not turn into an error
liveness        where each rank was last seen, for the message when one is lost
outcome         how a rank, and a world, ended
private_file    files in a shared temporary folder, of which only this user's own are read
request         a request from outside: to take a snapshot, or to stop
script_exit     exit codes for scripts that do not catch an error of the engine
session         the session: a small local folder that launcher and ranks of one world share
signals         turns a signal to one process into a request that all ranks answer at the same boundary
terminal_view   output and progress bar of a world on a terminal

Tests: tests/unit/session, tests/faults/test_requests.py, tests/faults/test_signals.py, tests/faults/test_hangs.py
"""
