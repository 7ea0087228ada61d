"""Iterable data sets, called streams: resumed by their own state or by reading again.

collation       calls the collate_fn of a stream: seeds it for each batch, and checks in workers that it keeps no
                state
content_digest  digests of samples, which have no indices in iterable data sets
loader          the loader of an iterable data set: its position is the number of batches read from each shard
schedule        the order in which the shards of a pass are read, the position in each, and the requests for
                their batches
shard           one shard of an iterable data set in one pass: read from its start, or from a state
shard_state     requests to the shards of a stream, their answers, and the states that they can resume from
shards          reads an iterable data set shard by shard, in a worker or in the main process
sources         how an iterable data set resumes at a position: by its own state, by its sampler, or by reading
                again
trial           checks at the start that a stream gives the same when it is read again, and resumes from its
                state
"""
