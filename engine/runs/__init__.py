"""What a run that ended or broke tells: report, curves, audit.

audit        whether, over all attempts of a run, every epoch used the samples of its order, each once (law 3)
cause        an error in one line
curves       the curves of a run as a picture, where matplotlib is installed
markdown     a report in Markdown: the same for a file, an artifact and an e-mail
publication  the report of a run, written into its folder: report.md, report.json, curves.png, metrics-so-far.csv
report       the report of a run, read from its folder alone: right also when the processes that watched the run
             are gone
run          a job under a name, its folder and what lies there
summary      what stands in the folders of a store's runs, in a line each

Tests: tests/unit/runs
"""
