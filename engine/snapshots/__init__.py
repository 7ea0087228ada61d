"""Snapshots: the whole state of a run at one position, or nothing.

<url>/<run>/
    parent.json                       of a fork: the run and the snapshot that it starts from
    lease/000003.json                 generations; each says from which snapshot it resumed
    snapshots/000000001200-g000003/   by step and generation
        rank-00000-of-00002.safetensors, rank-00000-of-00002.json, ...
        metrics.csv                   the rows since the snapshot before
        manifest.json                 written last: without it the folder never happened
    metrics/                          the rows of snapshots that were pruned
    best/  last/                      weights alone, committed in the same way
        000000001200-g000003/         model.safetensors, model.json, manifest.json

beat             signs of life of the process that trains a run, for processes on other machines
buffer_pool      reusable host memory that snapshots are copied into
catalog          which snapshots and weights of a run count
committer        every rank writes its files, then rank 0 commits them with a manifest
forks            makes forks of a run, and pins the snapshots that they need
holder           the process on this machine that advances a run now
inspection       everything in a run's store, and its faults
lease            which generation of a run may write
lineage          which generations of a run count, and how far
metric_rows      the metric log in snapshots: rows as CSV, and the rows of removed snapshots
parent           the parent of a fork: its snapshots, weights and metric rows are read, and nothing is copied
position         where in a run a snapshot stands, and the names of its folder and files
reader           one rank's tree out of a snapshot, and the weights of a run
repair           restores damaged parts of a run from intact ones
row_times        when the steps of a run were done
schedule         when a snapshot is due, and which snapshots stay
state_copy       copies a rank's state into memory that is written while training continues
weights          the best and the last weights of a run: which count, and their facts
weights_rebuild  rebuilds weights from a snapshot that holds the same state
writer           training copies its state and continues, a thread writes and commits the copy

Tests: tests/unit/snapshots, tests/faults/test_commit_calls.py, tests/faults/test_repair.py
"""
