"""Process trees that end together. Needs no torch.

child_processes     processes that this one starts from a function, signals, reaps, and never leaves behind
lifetime            processes that do not outlive the one that started them, and how to find those that did
loopback            what a world of one machine listens on: the loopback, where no other machine reaches it
preload             imports of what is large, with the garbage collector paused or beside other work
registered_ranks    ranks that have said who they are: what a supervisor does for them where their launcher does it
                    badly
supervised_process  a process and all it starts, as one thing that can be watched and ended
supervisor          the supervisor of a world: `python -m midstride.engine.processes.supervisor PARENT GRACE_S
                    COMMAND...`
"""
