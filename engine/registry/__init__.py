"""Champions: the weights that nights put in charge of a job, and how a challenger takes their place. Needs no torch.

comparison  whether a challenger takes the champion's place: only if it is better, by more than the margin
nightly     one night of a job: a run named after its date, from a plan that is made once to a decision that
            is made once
publication  trackers that keep models hear which weights are in charge
registry    the champions of a job: the one promoted last is the champion
report      the report of a night: what it came to, and why

Tests: tests/unit/registry, tests/faults/test_nights.py
"""
