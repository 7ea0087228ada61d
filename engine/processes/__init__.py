"""Process trees that end together. Needs no torch.

child_processes     processes that this one starts from a function, signals, reaps, and never leaves behind
environment         the environment of a program of ours: what is part of its bits is said, not left to chance
fork_server         a process that has imported torch, and forks the worlds of a run: `... .fork_server PARENT
                    SOCKET MODULE...`
forked_program      a program that runs in a fork of this process: a session, an environment and an end of its own,
                    no imports
lifetime            processes that do not outlive the one that started them, and how to find those that did
loopback            what a world of one machine listens on: the loopback, where no other machine reaches it
preload             imports of what is large, with the garbage collector paused or beside other work
proc_entry          how a fork stands in `/proc`: there the kernel shows what its ancestor was started with, unless
                    that is written over
process_identity    which process this is, on which machine and since when: by that it can be told later
                    whether it lives
registered_ranks    ranks that have said who they are: what a supervisor does for them where their launcher does it
                    badly
supervised_process  a process and all it starts, as one thing that can be watched and ended
supervisor          the supervisor of a world: `python -m midstride.engine.processes.supervisor PARENT GRACE_S
                    COMMAND...`
"""
