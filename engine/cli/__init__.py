"""The commands that need no Prefect.

app           the command line of the engine: `python -m midstride.engine`, and the part of `midstride` that
              needs no Prefect
champions     `midstride champion list | show | rollback`: whose weights are in charge, and back to those
              before
output        what the commands print: how a world ended, and an audit
resume_check  whether a job resumes exactly, tried on a few steps of it: `midstride check --resume`
snapshots     `midstride snapshots list | verify | prune | repair`: look at the snapshots of a run, or of all
              runs of a store
"""
