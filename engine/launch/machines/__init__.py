"""Runs on several machines: nodes that come and go, each TorchElastic's agent and ranks.

agent           torchrun's agent on a node, below `midstride join`: the launcher tells it who trains together
channel         authenticated messages over a socket between two processes that share a secret
connections     the connections of the nodes to the launcher, and the messages on them
join            a node, from its start to its end: `midstride join HOST:PORT`
node_bits       what decides the bits of a machine's sums, compared when nodes meet
rank            a rank of a node: `python -m midstride.engine.launch.machines.rank FOLDER`
report          the messages of a node to the launcher, and the plans of the launcher that it follows
round_log       what happens in each round, and what came of it
round_watchdog  looks for a hang of one round, and gives its ranks time to write their stacks before it is ended
rounds          which nodes train together: rounds that end when a node goes or comes
secret          the secret of a run on several machines: who knows it takes part in the run
server          the launcher: `python -m midstride.engine.launch.machines.server SESSION GRACE_S`
"""
