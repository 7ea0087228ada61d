"""Contents of a job: its file, options and names. No torch.

arguments        the texts in the arguments of a job, which are JSON: walked here, where no torch is loaded
clusters         the clusters as rows of data: what gives a world its machines, and what `on_args` may hold
import_paths     from "package.module:attribute" to the thing itself, with the job's folder importable
job              every choice that decides a run, from one YAML file, all faults found at once
json_schema      the job's JSON schema, which a Prefect server draws a form from and checks the parameters of
                 a run by
lanes            what lanes do not go together with
launchers        the launchers as rows of data: a name and where the class is
lightning_names  arguments of Lightning, and the ones that replace them here
loggers          the loggers as rows of data, and how a job or a Trainer names them
nodes            on how many machines a world trains, and which numbers of them will do
options          the choices a Trainer and a job share, validated in one place, with titles for forms
overrides        whether the methods of a user's class can be called as those of its base class are
strategies       the strategies as rows of data: where the class is, what starts its ranks, what it takes,
                 what it refuses
strategy_spec    a row of the table of strategies, and a request to it
validation       what pydantic refuses of a choice, worded for the person who made it
world            which processes train together, as a job says it
yaml_file        YAML as people mean it, choices set from outside, and their faults

Tests: tests/unit/config
"""
