"""Runs: a run's folder, its report, its curves, its audit.

audit         whether each epoch of a run used the samples of its order, each once, over all attempts
cause         an error in one line
curves        the curves of a run as a picture; needs matplotlib
ending        why an attempt at a run ended
forked_job    forks of the runs of jobs, with the settings that each attempt of a fork has
replay        steps of a run computed again in a temporary fork, and compared with the run
replayed_rows  the rows of a replay beside those of the run
recomputed_states  states of a run computed again between kept snapshots, compared part by part
run_difference  the first difference of two runs, and its cause
report_files  writes a run's report into its folder: report.md, report.json, curves.png, metrics-so-far.csv
report_text   the report of a run as Markdown, for a file, an artifact and an e-mail
repeatability  two executions of the first steps of a job, compared
run           a job under a name, and its folder
run_comparison  runs side by side: the settings that differ, and the values that each reached
run_report    the report of a run, read from its folder alone: right also when the watching processes are gone
summary       the runs of a store, one line each
trackers      tells trackers how a run ended

Tests: tests/unit/runs
"""
