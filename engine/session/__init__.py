"""One attempt at a run, as its launcher and its ranks see it. Needs no torch.

attempts       a run's attempts, one file each, and the decision whether to try again
crash          signal, line and stack of a rank that native code crashed
ending         why a fit, or an attempt at a run, ended
events         events of a world: one JSON line each, in a local file that the launcher reads
heartbeat      the progress of a rank, in shared memory that its launcher reads
liveness       where each rank was last seen, for the message when one is lost
outcome        how a rank, and a world, ended
private_file   files that other users of the machine cannot put in our way, read or write
replay_plan    the steps that a replay makes, in the environment of its ranks
requests       requests to stop or to take a snapshot: signals, and the boundary at which all ranks answer
script_exit    exit codes for scripts that do not catch an error of the engine
session        the session: a small local folder that launcher and ranks of one world share
terminal_view  output and progress bar of a world on a terminal

Tests: tests/unit/session, tests/faults/test_requests.py, tests/faults/test_signals.py, tests/faults/test_hangs.py
"""
