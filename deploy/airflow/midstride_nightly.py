"""A DAG that trains a midstride job every night; Airflow's retries resume it bit for bit. See docs/airflow.md."""

import os
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any

from airflow.providers.standard.hooks.subprocess import SubprocessHook
from airflow.sdk import DAG, BaseOperator
from airflow.sdk.exceptions import AirflowException, AirflowFailException

_WRONG = 2  # what `midstride fit` ends with where a retry cannot help


class MidstrideFit(BaseOperator):
    """Run `midstride fit`: the same run name, in the next try, resumes.

    Args:
        job: the job file.
        run: name of the run; the same over retries.
        choices: set from outside, such as trainer.max_epochs=2.
        command: where `midstride` is.
    """

    template_fields = ("job", "run", "choices")

    def __init__(self, *, job: str, run: str, choices: list[str], command: str, **options: Any) -> None:
        super().__init__(**options)
        self.job, self.run, self.choices, self.command = job, run, choices, command

    @cached_property
    def _process(self) -> SubprocessHook:
        return SubprocessHook()

    def execute(self, context: Any) -> None:
        """Train to the end."""
        words = [self.command, "fit", self.job, "--run", self.run]
        words += [word for choice in self.choices for word in ("--set", choice)]
        code = self._process.run_command(words, env=dict(os.environ)).exit_code
        if code == _WRONG:
            raise AirflowFailException(f"the job or its code is wrong: see the log above ({' '.join(words)})")
        if code:
            raise AirflowException(f"{self.run} ended with {code}; the next try resumes it")

    def on_kill(self) -> None:
        """Ask the world to stop: it takes a snapshot first."""
        self._process.send_sigterm()


with DAG(
    "midstride_nightly",
    schedule="0 2 * * *",
    start_date=datetime(2026, 1, 1),
    catchup=False,
    max_active_runs=1,  # nights do not overlap
):
    MidstrideFit(
        task_id="fit",
        job=os.environ["MIDSTRIDE_JOB"],
        run="nightly-{{ ds }}",
        choices=[choice.replace("{date}", "{{ ds }}") for choice in os.environ.get("MIDSTRIDE_SET", "").split()],
        command=os.environ.get("MIDSTRIDE", "midstride"),
        retries=int(os.environ.get("MIDSTRIDE_RETRIES", "10")),
        retry_delay=timedelta(seconds=float(os.environ.get("MIDSTRIDE_RETRY_DELAY_S", "30"))),
    )
