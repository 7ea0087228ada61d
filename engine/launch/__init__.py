"""A world of processes from its start to its end.

early_imports     the fork server of a command that trains, started before the command line itself is imported:
                  torch takes longer
elastic_ranks     the ranks of torch's elastic agent as forks of it: torch is imported once, not by each of them
elastic_rendezvous  tells torch's elastic agents who takes part: on one machine the agent alone, without a port
horovod_rank      a rank under horovodrun: `python -m midstride.engine.launch.horovod_rank SESSION`
horovodrun_agent  horovodrun, without the traceback it ends with
job_fork_server   the fork server of a job: one process imports torch, and all that is launched for the job is forked
                  from it
launch            launch one world, watch it to its end, and leave nothing of it behind
log_lines         leaves out what torchrun, gloo and stores print about their own work
preemption        notices that a spot machine is about to be taken away: a snapshot is asked for while there
                  is time
rank              what each rank of a world runs: `python -m midstride.engine.launch.rank SESSION`
recovery          attempts without a record: their launcher was killed, but its session may still be here
spawn_agent       the agent of a world on one machine: `python -m midstride.engine.launch.spawn_agent SESSION RANKS
                  GRACE_S`
torch_internals   privates of torch's elastic agent, named here alone
torchrun_agent    torchrun's agent for this machine alone, whose ranks end with it
watchdog          finds, by the heartbeats of a world, ranks that hang and ranks for which the others wait
clusters/         what starts the machines: Slurm, Ray, Kubernetes
launchers/        the commands that start a world, by name
machines/         a world on several machines: nodes that come and go

Tests: tests/unit/launch, tests/faults/test_launch.py, tests/faults/test_launchers.py, tests/distributed/test_nodes.py
"""
