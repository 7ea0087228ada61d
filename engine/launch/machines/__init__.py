"""A world on several machines: nodes that come and go, each TorchElastic's agent with its ranks.

agent           what a node runs below `midstride join`: torchrun's agent, told by the launcher who trains together
join            a node, from its coming to its end: `midstride join HOST:PORT`
node_bits       what decides the bits of a machine's sums, compared when nodes meet
node_store      what the launcher and the nodes tell each other: JSON in a key-value store of torch's
rank            a rank of a node: `python -m midstride.engine.launch.machines.rank FOLDER`
report          the messages of a node to the launcher, and the plans of the launcher that it follows
round_log       what happens in each round, and what came of it
round_watchdog  looks for a hang of one round, and gives its ranks time to write their stacks before it is ended
rounds          which nodes train together: rounds that end when a node goes or comes
server          the launcher: `python -m midstride.engine.launch.machines.server SESSION GRACE_S`
"""
