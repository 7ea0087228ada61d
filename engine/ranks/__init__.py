"""Which devices a Trainer uses, and who starts its ranks.

devices            which devices of a machine a Trainer uses, and which of them one rank uses
dispatch           runs a call of a Trainer in every rank of its world; starts the ranks if no launcher has
gpus               parses `gpus` and `devices`, and finds the free GPUs, without initialising CUDA in this
                   process
multiprocess       ranks as child processes of the process that calls a Trainer: `ddp_spawn`, `ddp_fork` and
                   `ddp_notebook`
pickling           finds the part of an object that cannot be pickled, by its path
placement          where a Trainer trains: its strategy, its world, its devices, and how its ranks are started
predictions        the return value of `predict`, for one or several loaders, on one or several ranks
subprocess_script  the ranks of a plain script: the script is run again for each other rank, and this process is
                   rank 0
tpus               parses `tpu_cores`, without importing torch_xla

Tests: tests/unit/ranks, tests/distributed/test_starting.py, tests/distributed/test_notebook.py
"""
