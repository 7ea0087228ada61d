"""The devices of a Trainer, and the start of its ranks.

devices            the devices of a machine that a Trainer uses, and those of one rank
dispatch           runs a call of a Trainer in every rank, and joins predictions
gpus               parses `gpus` and `devices`, and finds free GPUs, without initialising CUDA in this process
multiprocess       ranks as child processes of the process that calls a Trainer: `ddp_spawn`, `ddp_fork` and
                   `ddp_notebook`
placement          strategy, process group and devices of a Trainer, and how its ranks are started
script_ranks       ranks as copies of a plain script: `ddp`

Tests: tests/unit/ranks, tests/distributed/test_starting.py, tests/distributed/test_notebook.py
"""
