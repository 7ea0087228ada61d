"""Operators for the stages of a training, over the command line of midstride. Retries resume, bit for bit."""

import json
import subprocess
from collections.abc import Sequence
from tempfile import TemporaryFile
from typing import Any, cast

from airflow.sdk import Asset, AssetAlias, BaseOperator
from airflow.sdk.exceptions import AirflowException, AirflowFailException

from midstride_airflow.commands import WRONG, Decision, PreparedData, RunStatus, command_line
from midstride_airflow.triggers import RunTrigger

__all__ = [
    "MidstrideCompareOperator",
    "MidstrideEvaluateOperator",
    "MidstrideFitOperator",
    "MidstrideOperator",
    "MidstridePrepareOperator",
]


class MidstrideOperator(BaseOperator):
    """Runs a command of midstride on a job. Its JSON is the XCom, and the metadata of each `Asset` in `outlets`.

    Args:
        job: path of the job file.
        run: name of the run; the same in all tries.
        overrides: keys of the job to override, such as "trainer.max_epochs=2".
        command: path of `midstride`.
    """

    template_fields: Sequence[str] = ("job", "run", "overrides")

    def __init__(
        self,
        *,
        job: str,
        run: str | None = None,
        overrides: Sequence[str] = (),
        command: str = "midstride",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.job, self.run, self.overrides, self.command = job, run, list(overrides), command
        self._process: subprocess.Popen[str] | None = None

    def on_kill(self) -> None:
        """Send SIGTERM, upon which a training takes a last snapshot and ends."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def words(self, stage: str, *flags: str) -> list[str]:
        """Return the command line of a stage of this job."""
        return command_line(self.command, stage, self.job, self.run, self.overrides, *flags)

    def call(self, words: Sequence[str]) -> None:
        """Run a command and log what it prints.

        Raises:
            AirflowFailException: the job or its code is wrong; Airflow does not retry.
            AirflowException: the command ended early; Airflow retries, and a run resumes.
        """
        process = self._start(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self._finish(process, process.stdout)

    def ask(self, words: Sequence[str]) -> str:
        """Run a command, log its errors, and return its output. Raises as `call` does."""
        with TemporaryFile("w+") as output:
            process = self._start(words, stdout=output, stderr=subprocess.PIPE)
            self._finish(process, process.stderr)
            output.seek(0)
            return output.read()

    def publish(self, context: Any, result: Any) -> Any:
        """Return `result`, and give it to the assets in `outlets` as metadata."""
        for outlet in self.outlets:
            if isinstance(outlet, Asset):
                context["outlet_events"][outlet].extra = dict(result)
        return result

    def _start(self, words: Sequence[str], **streams: Any) -> "subprocess.Popen[str]":
        self.log.info("%s", " ".join(words))
        # In a session of its own: who ends the worker's processes leaves the run time for its last snapshot.
        self._process = subprocess.Popen(words, text=True, errors="replace", start_new_session=True, **streams)
        return self._process

    def _finish(self, process: "subprocess.Popen[str]", lines: Any) -> None:
        for line in lines:
            self.log.info("%s", line.rstrip())
        code = process.wait()
        if code == WRONG:
            raise AirflowFailException("the job or its code is wrong: see the log above")
        if code:
            raise AirflowException(f"the command ended with {code}: see the log above")


class MidstridePrepareOperator(MidstrideOperator):
    """Prepares the data of a job. XCom: `PreparedData`."""

    def execute(self, context: Any) -> PreparedData:
        """Prepare the data."""
        return cast(PreparedData, self.publish(context, json.loads(self.ask(self.words("prepare", "--json")))))


class MidstrideFitOperator(MidstrideOperator):
    """Trains to the end; each try resumes from the last snapshot. XCom: `RunStatus`.

    With `submit`, a scheduler runs the training, and the task waits deferred: it occupies no worker, and the training
    continues if the triggerer restarts. Limit the whole by `execution_timeout`.

    Args:
        submit: command that has a scheduler run the command line put after it, and then ends, such as
            ["sbatch", "--parsable", "train.sh"] or ["kubectl", "create", "job", "-o", "name", ...].
        cancel: command that ends the job of the scheduler put after it (the last line that `submit` printed) when a
            person stops the task, such as ["scancel"] or ["kubectl", "delete"].
        poll_s: seconds between two looks at the run.
        lost_after_s: seconds without a new snapshot after which the run is lost and retried; never if empty.
    """

    template_fields = (*MidstrideOperator.template_fields, "submit", "cancel")

    def __init__(
        self,
        *,
        submit: Sequence[str] = (),
        cancel: Sequence[str] = (),
        poll_s: float = 30.0,
        lost_after_s: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.submit, self.cancel = list(submit), list(cancel)
        self.poll_s, self.lost_after_s = poll_s, lost_after_s

    def execute(self, context: Any) -> RunStatus:
        """Train, or submit the training and wait for it."""
        if not self.submit:
            self.call(self.words("fit"))
            return cast(RunStatus, self.publish(context, self._status()))
        before = self._status()
        said = self.ask([*self.submit, *self.words("fit")]).split()
        trigger = RunTrigger(
            status=self.words("status", "--json"),
            after=before["attempts"],
            cancel=[*self.cancel, said[-1]] if self.cancel and said else [],
            poll_s=self.poll_s,
            lost_after_s=self.lost_after_s,
        )
        self.defer(trigger=trigger, method_name="attempt_ended", timeout=self.execution_timeout)

    def attempt_ended(self, context: Any, event: RunStatus) -> RunStatus:
        """Return the status of a run whose attempt is done.

        Raises:
            AirflowFailException: the job or its code is wrong; Airflow does not retry.
            AirflowException: the attempt ended early; Airflow retries, and the run resumes.
        """
        told = f"{event['url']}: {event['state']} at step {event['step']}; `midstride report` tells more"
        if event["state"] == "user_error":
            raise AirflowFailException(told)
        if event["state"] != "done":
            raise AirflowException(told)
        return cast(RunStatus, self.publish(context, event))

    def _status(self) -> RunStatus:
        return cast(RunStatus, json.loads(self.ask(self.words("status", "--json"))))


class MidstrideEvaluateOperator(MidstrideOperator):
    """Tests the best weights of a run. XCom: the scores by name."""

    def execute(self, context: Any) -> dict[str, float]:
        """Test the weights."""
        return cast("dict[str, float]", self.publish(context, json.loads(self.ask(self.words("evaluate", "--json")))))


class MidstrideCompareOperator(MidstrideOperator):
    """Compares a run with the champion and promotes it if it is better. XCom: `Decision`.

    For each `AssetAlias` in `outlets`, a promotion is an event of the asset of the same name, with the decision as
    metadata. A run that is not promoted makes no such event.
    """

    def execute(self, context: Any) -> Decision:
        """Compare, and promote."""
        decision: Decision = json.loads(self.ask(self.words("compare", "--promote", "--json")))
        if decision["promoted"] and decision["champion_run"] == decision["run"]:  # else rolled back since
            for outlet in self.outlets:
                if isinstance(outlet, AssetAlias):
                    context["outlet_events"][outlet].add(Asset(outlet.name), extra=dict(decision))
        return cast(Decision, self.publish(context, decision))
