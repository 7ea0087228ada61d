"""Which devices a Trainer uses, and who starts its ranks.

devices            which devices of a machine are meant, and which of them one rank has
dispatch           a Trainer's calls, made in every rank of its world, which is started now if no launcher has
gpus               which GPUs are meant, which there are, and which are free; without touching CUDA in this
                   process
multiprocess       ranks as children of the process that calls a Trainer: `ddp_spawn`, `ddp_fork` and
                   `ddp_notebook`
pickling           what keeps something from being pickled, by its path: `module.transform.fn`, not "can't
                   pickle lambda"
placement          where a Trainer trains: its strategy, its world, its devices, and who has to start the
                   ranks
predictions        what `predict` returns: of several loaders, and of several ranks
subprocess_script  the ranks of a plain script: the script runs again, once for each other rank, and this
                   process is rank 0
tpus               which cores of a TPU are meant; without asking torch_xla
"""
