"""Champions: a job's weights in use, and their replacement by a night's challenger.

No torch.

comparison         whether a challenger replaces the champion: only if it is better by more than the margin
night_report       the report of a night: its result and the reason
nightly            one night of a job: a run named after its date, with one plan and one decision
registry           the champions of a job: the newest promotion is in use
tracker_promotion  tells trackers that keep models which weights are in use

Tests: tests/unit/registry, tests/faults/test_nights.py
"""
