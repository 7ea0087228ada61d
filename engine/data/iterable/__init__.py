"""Iterable data sets: streams that go on where they were, by their state or by reading again.

collation       the collate_fn of a stream: each batch with random numbers of its own; in a worker, looked at
                with some of them
content_digest  digests of what a stream gives: samples of iterable data sets have no indices to tell them by
loader          the loader of an iterable data set: its position is what was read of each shard
schedule        the order in which the shards of a pass are read, how far each was read, and the requests for
                their batches
shard           one shard of an iterable data set in one pass: read from its start, or from a state
shard_state     requests to the shards of a stream, their answers, and the states that they can go on from
shards          reading an iterable data set shard by shard, wherever that happens: in a worker or in the main
                process
sources         how an iterable data set comes back to a position: by its own state, by its sampler, or by
                reading again
trial           a stream is tried before it is trusted: read again it gives the same, and its state brings it
                back to its position
"""
