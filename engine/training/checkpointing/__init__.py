"""Checkpointing: what a fit's state consists of, and how it goes to snapshots and comes back.

checkpointer   a fit's state kept in its run, and restored from there
data_changes   whether training changes what it reads in the middle of an epoch: no run could go on from there
facts          what manifests say of a fit: what makes its run this run, and what stands beside its weights
identity       what may change between two attempts of a run, and what is said when it does
state_parts    the parts of a fit's state: everything that decides how it goes on
rank_warnings  warnings of all ranks, merged and logged by the first
replica_check  whether ranks have alike what a snapshot holds once for all of them
restore_check  what could not come back in the next attempt is found within seconds of this one's start
roots          where a fit's objects are found: its module, callbacks, data, optimizers, schedulers, and
               generators in globals
run_store      a run as one fit sees it: its folder, where it resumes, its snapshots, its weights, its metric
               log
settings       settings of a fit that a snapshot brings along: which of those that another attempt asks for take
               effect
sources        what the user's code said when a snapshot was taken: a digest of each Python module, and of what was
               typed in a notebook
text_order     the order of sets of text: another in each interpreter, unless PYTHONHASHSEED fixes how text hashes
unsaved_state  what no snapshot holds, and what user code could still keep a count in
world_size     another number of ranks: the same global batches, cut otherwise, and every rank's state put
               together anew
"""
