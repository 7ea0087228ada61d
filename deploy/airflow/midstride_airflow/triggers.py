"""Trigger that waits for a run which a scheduler trains. It asks the command line; the run needs no triggerer."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from midstride_airflow.commands import WRONG, RunStatus

__all__ = ["RunTrigger"]


class RunTrigger(BaseTrigger):
    """Fires with the status of a run once an attempt has ended.

    Args:
        status: command line of `midstride status --json`.
        after: number of attempts before the one to wait for.
        cancel: command that ends the scheduler's job, for a task that a person stops.
        poll_s: seconds between two looks.
        lost_after_s: seconds without a sign of life, such as a snapshot, after which the run is lost.
    """

    def __init__(
        self, status: list[str], after: int, cancel: list[str], poll_s: float, lost_after_s: float | None
    ) -> None:
        super().__init__()
        self.status, self.after, self.cancel = status, after, cancel
        self.poll_s, self.lost_after_s = poll_s, lost_after_s

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the class and its arguments."""
        names = ("status", "after", "cancel", "poll_s", "lost_after_s")
        return "midstride_airflow.triggers.RunTrigger", {name: getattr(self, name) for name in names}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Poll until the attempt has ended.

        Raises:
            RuntimeError: the job file is wrong or missing on the triggerer's machine.
        """
        while (found := await self._look()) is None:
            await asyncio.sleep(self.poll_s)
        yield TriggerEvent(dict(found))

    async def on_kill(self) -> None:
        """End the scheduler's job when a person stops the task. Its signal has the run take a last snapshot."""
        if self.cancel:
            await (await asyncio.create_subprocess_exec(*self.cancel)).wait()

    async def _look(self) -> RunStatus | None:
        """Return the status of the run if the attempt has ended."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*self.status, stdout=pipe, stderr=pipe)
        said, error = await process.communicate()
        if process.returncode == WRONG:
            raise RuntimeError(error.decode(errors="replace"))
        if process.returncode:  # the store does not answer now
            self.log.warning("%s", error.decode(errors="replace"))
            return None
        found: RunStatus = json.loads(said)
        if found["attempts"] <= self.after:
            return None
        if found["state"] != "running":
            return found
        silent_s = time.time() - (found["time"] or 0.0)
        if self.lost_after_s is not None and silent_s > self.lost_after_s:
            return {**found, "state": "lost"}
        return None
