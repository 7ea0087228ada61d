"""Trees of processes that end together. Needs no torch.

child_processes     processes started from a function of this one: started, signalled, reaped
environment         the environment variables of our own programs, those that decide bits included
fork_server         a process that has imported torch, and forks the worlds of a run: `... .fork_server PARENT
                    SOCKET MODULE...`
forked_program      runs a program in a fork of this process, with a session and an environment of its own
lifetime            processes that end with their parent, and how to find those that did not
loopback            the loopback address that a world on one machine listens on
preload             imports large libraries with the garbage collector paused, or beside other work
proc_entry          writes a fork's command line and variables into `/proc`, which else shows those of its ancestor
process_identity    identifies a process by machine, number and start, to tell later whether it lives
registered_ranks    ranks known by their heartbeats, which the supervisor stops itself where horovodrun does it badly
signal_handlers     handlers of signals for the time of a block
signal_listener     signals that ask a process to stop, for threads other than the main one
supervised_process  a process and all that it starts, watched and ended as one
supervisor          the supervisor of a world: `python -m midstride.engine.processes.supervisor PARENT GRACE_S
                    COMMAND...`

Tests: tests/unit/processes, tests/faults/test_launchers.py, tests/faults/test_world_output.py
"""
