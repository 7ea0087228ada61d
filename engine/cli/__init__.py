"""The commands that need no Prefect.

app           the command line of the engine: `python -m midstride.engine`, and the part of `midstride` that
              needs no Prefect
champions     `midstride champion list | show | rollback`: whose weights are in charge, and back to those
              before
compare_runs  `midstride compare RUN RUN`: settings that differ and values, side by side, and a picture
diff          `midstride diff`: the first difference of two runs, and its cause
export        `midstride export`: a run's metric log for a tracker, or its weights in the format of another
              program
fork          `midstride fork`: a new run from a snapshot of another run, without a copy
output        what the commands print: how a world ended, and an audit
project       `midstride init`: a project that trains, to put one's own model and data into
replay        `midstride replay`: a step of a run computed again, shown, and compared with the run
report_view   the report of a run on a terminal, and what came of the runs of a store in a table
resume_check  whether a job resumes exactly, tried on a few steps of it: `midstride check --resume`
runs          `midstride runs` and `midstride report`: what came of the runs of a store, and of one of them
schema        `midstride schema`: the JSON schema of job files, for editors
snapshots     `midstride snapshots list | verify | prune | repair`: look at the snapshots of a run, or of all
              runs of a store
stages        `midstride prepare | status | evaluate | test | predict | compare`: stages beside `fit`
stop_signals  signals that ask a command to stop, as exceptions
table         a table whose rows become blocks on a terminal that is too narrow for it
verify        `midstride verify`: a run computed again between kept snapshots, states compared
template/     what `midstride init` writes, beside job.yaml

Tests: tests/unit/cli, tests/unit/test_commands.py
"""
