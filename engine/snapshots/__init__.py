"""Snapshots: the whole state of a run at one place, or nothing.

    <url>/<run>/
        lease/000003.json                 generations; each says from which snapshot it resumed
        snapshots/000000001200-g000003/   by step and generation
            rank-00000-of-00002.safetensors, rank-00000-of-00002.json, ...
            metrics.csv                   the rows since the snapshot before
            manifest.json                 written last: without it the folder never happened
        metrics/                          the rows of snapshots that were pruned
        best/  last/                      weights only

`store` holds bytes, `checksums` guards them, `codec` turns state into JSON and tensors, `lease` says who
may write, `writer` takes a snapshot, `history` knows which ones count, `reader` reads one, `weights` keeps
the best and the last weights.
"""
