"""The commands that need no Prefect.

app           the command line of the engine: `python -m midstride.engine`, and the part of `midstride` that
              needs no Prefect
champions     `midstride champion list | show | rollback`: whose weights are in charge, and back to those
              before
diff          `midstride diff`: the first difference of two runs, and its cause
export        `midstride export`: a run's metric log for a tracker, or its weights in the format of another
              program
fork          `midstride fork`: a new run from a snapshot of another run, without a copy
output        prints the end of a world, and an audit
project       `midstride init | schema`: a project that trains, and the JSON schema of job files
replay        `midstride replay`: a step of a run computed again, shown, and compared with the run
report_view   the report of a run on a terminal, and the outcomes of a store's runs in a table
resume_check  whether a job resumes exactly, tried on a few steps of it: `midstride check --resume`
snapshots     `midstride runs | snapshots list | verify | prune | repair`: the runs of a store, and their snapshots
stages        `midstride prepare | status | evaluate | test | predict | compare`: stages beside `fit`
stop_signals  signals that ask a command to stop, as exceptions
table         a table whose rows become blocks on a terminal that is too narrow for it
verify        `midstride verify`: a run computed again between kept snapshots, states compared
template/     what `midstride init` writes, beside job.yaml

Tests: tests/unit/cli, tests/unit/test_commands.py
"""
