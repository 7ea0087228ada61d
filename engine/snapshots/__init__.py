"""Snapshots: the whole state of a run at one position, or nothing.

<url>/<run>/
    lease/000003.json                 generations; each says from which snapshot it resumed
    snapshots/000000001200-g000003/   by step and generation
        rank-00000-of-00002.safetensors, rank-00000-of-00002.json, ...
        metrics.csv                   the rows since the snapshot before
        manifest.json                 written last: without it the folder never happened
    metrics/                          the rows of snapshots that were pruned
    best/  last/                      weights only

buffer_pool      host memory that snapshots are copied into, used again and again
catalog          which snapshots of a run count
committer        every rank writes its files, then rank 0 commits the whole
inspection       everything that lies in a run's store, and what is wrong with it
lease            which generation of a run may write
lineage          which generations of a run count, and how far
metric_segments  the rows of the metric log whose snapshots were pruned
position         where in a run a snapshot stands, and how its folder is called
reader           one rank's tree out of one snapshot
repair           what of a run was damaged and can be made anew from what is whole
retention        how many snapshots stay
metric_rows      rows of the metric log as CSV: one text a snapshot, joined into one log
schedule         when a snapshot is due
staging          a rank's state copied to where it can be written from, while training goes on
verification     files compared with the manifest that names them
weights          the best and the last of a run, with the metrics they reached
weights_index    which weights of a run count
weights_queue    the queue of weights: best and last weights on their way to the store, behind training
weights_rebuild  weights made anew from a snapshot that holds the same state
writer           training copies its state and goes on, a thread behind it writes and commits

Tests: tests/unit/snapshots, tests/faults/test_commit_calls.py, tests/faults/test_repair.py
"""
