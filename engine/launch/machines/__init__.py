"""Runs on several machines: nodes that come and go, each TorchElastic's agent and ranks.

agent           torchrun's agent on a node, below `midstride join`: the launcher tells it who trains together
channel         authenticated messages over a socket between two processes that share a secret
connections     the connections of the nodes to the launcher, and the messages on them
join            a node, from its start to its end: `midstride join HOST:PORT`
rank            a rank of a node: `python -m midstride.engine.launch.machines.rank FOLDER`
report          the messages of a node to the launcher, and the plans of the launcher that it follows
rounds          which nodes train together: rounds that end when a node goes or comes
secret          the secret of a run on several machines: machines that know it take part
server          the launcher: `python -m midstride.engine.launch.machines.server SESSION GRACE_S`
"""
