"""Snapshots: the whole state of a run at one place, or nothing.

    <url>/<run>/
        lease/000003.json                 generations; each says from which snapshot it resumed
        snapshots/000000001200-g000003/   by step and generation
            rank-00000-of-00002.safetensors, rank-00000-of-00002.json, ...
            metrics.csv                   the rows since the snapshot before
            manifest.json                 written last: without it the folder never happened
        metrics/                          the rows of snapshots that were pruned
        best/  last/                      weights only

`store` holds bytes, `checksums` guards them, `codec` and `tensors` turn state into JSON and tensors, `lease` says who
may write. `staging` copies state into the `arena`, `writer` has a thread write it behind training, `committer` sees to
it that all ranks' files are there, `schedule` knows when the next one is due, `retention` removes old ones. `catalog`
knows which ones count, `reader` reads one, `segments` keeps the rows of those that were removed. `weights` are the best
and the last ones, which wait in the `outbox`; `weights_index` knows which of them count.
"""
