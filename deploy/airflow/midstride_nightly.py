"""A DAG that trains a midstride job every night; Airflow's retries resume it bit for bit. See docs/airflow.md."""

import os
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any

from airflow.providers.standard.hooks.subprocess import SubprocessHook
from airflow.sdk import DAG, BaseOperator
from airflow.sdk.exceptions import AirflowException, AirflowFailException

_WRONG = 2  # exit code of `midstride fit` after an error that a retry cannot help


class MidstrideFit(BaseOperator):
    """Run `midstride fit`; a retry with the same run name resumes the run.

    Args:
        job: path of the job file.
        run: name of the run; the same in all retries.
        choices: keys of the job to override, such as trainer.max_epochs=2.
        command: path of `midstride`.
    """

    template_fields = ("job", "run", "choices")

    def __init__(self, *, job: str, run: str, choices: list[str], command: str, **options: Any) -> None:
        super().__init__(**options)
        self.job, self.run, self.choices, self.command = job, run, choices, command

    @cached_property
    def _process(self) -> SubprocessHook:
        return SubprocessHook()

    def execute(self, context: Any) -> None:
        """Train to the end.

        Raises:
            AirflowFailException: the job or its code is wrong; Airflow does not retry.
            AirflowException: the run ended early; Airflow retries, and the run resumes.
        """
        words = [self.command, "fit", self.job, "--run", self.run]
        words += [word for choice in self.choices for word in ("--set", choice)]
        code = self._process.run_command(words, env=dict(os.environ)).exit_code
        if code == _WRONG:
            raise AirflowFailException(f"the job or its code is wrong: see the log above ({' '.join(words)})")
        if code:
            raise AirflowException(f"{self.run} ended with {code}; the next try resumes it")

    def on_kill(self) -> None:
        """Send SIGTERM, upon which the run takes a snapshot and ends."""
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
