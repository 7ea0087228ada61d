"""The session of a world: the small local folder in which its ranks and its launcher meet.

    job.json                  the resolved job, the run's name and the attempt's number
    events.jsonl              what happens, as it happens
    outcome-rank-00000.json   how each rank ended, written by that rank
    heartbeat-rank-00000      what each rank is doing
    crash-rank-00000          Python's stack, where native code has crashed the rank
    stacks-rank-00000         stacks of the rank's threads, which the launcher asks for when the ranks hang
    ranks                     how many there are, where that is not the job's to say: nodes come and go
    log.txt                   every line the world printed
    launcher.lock             held by the process that launches the world

It is local and short-lived: what must survive the machine is in the store.
"""

import fcntl
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from midstride.engine.errors import SnapshotDamaged, UserError, WorldError
from midstride.engine.processes.lifetime import SESSION
from midstride.engine.session.crash import CRASHES, crashes_in
from midstride.engine.session.outcome import Outcome
from midstride.engine.session.private_file import read_own
from midstride.engine.storage.checksums import Kind, decode_object
from midstride.engine.storage.draft import draft_of

__all__ = ["Session"]


#: less than that may be too little for an outcome with a traceback
_ROOM_BYTES = 1 << 16

#: how the world ended and why the store has no word of it
_UNRECORDED = "unrecorded.json"
#: the files in which ranks say how they ended
_OUTCOMES = "outcome-rank-*.json"
_HEARTBEATS = "heartbeat-rank-*"
_DIGITS = 9


class Session:
    """One world's folder.

    Args:
        folder: an existing session; `Session.create` makes a new one.
    """

    #: environment variable that tells a rank where its session is, and marks it as belonging to it
    VARIABLE: ClassVar[str] = SESSION

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)

    @classmethod
    def create(cls, document: Mapping[str, Any]) -> "Session":
        """Return a new session with `document` as job.json, in the folder for temporary files."""
        session = cls._empty(document["run"])
        session.begin(document)
        return session

    @classmethod
    @contextmanager
    def held(cls, document: Mapping[str, Any]) -> Iterator["Session"]:
        """Make a session locked for this process until the block, or the process, ends.

        The lock comes before the document: a session without one has no owner.
        """
        session = cls._empty(document["run"])
        with session.locked():
            session.begin(document)
            yield session

    @classmethod
    def _empty(cls, run: str) -> "Session":
        name = re.sub(r"[^A-Za-z0-9._-]", "-", run)[:40]
        try:
            return cls(tempfile.mkdtemp(prefix=f"midstride-{name}-"))
        except FileNotFoundError as error:
            raise UserError("no folder takes temporary files, neither TMPDIR nor /tmp: name one in TMPDIR") from error

    def fullness(self) -> str:
        """Return a message if no space is left for the outcomes of ranks, else an empty text."""
        if shutil.disk_usage(self.folder.parent).free >= _ROOM_BYTES:
            return ""
        return (
            f"No space is left in {self.folder.parent}, where ranks write how they end. Free some there, or name "
            "another folder in TMPDIR: the same command then resumes the run"
        )

    def begin(self, document: Mapping[str, Any]) -> None:
        """Write `document` as job.json; the folder is made if it is missing."""
        self.folder.mkdir(exist_ok=True)
        _write(self.folder / "job.json", json.dumps(document, indent=2))

    @classmethod
    def from_environment(cls) -> "Session | None":
        """Return the session this process belongs to, if a launcher started it."""
        folder = os.environ.get(cls.VARIABLE)
        return cls(folder) if folder else None

    @property
    def events(self) -> Path:
        """The file of events."""
        return self.folder / "events.jsonl"

    def has_started(self) -> bool:
        """Return whether a rank of this round has started: it has a heartbeat, or said how it ended."""
        return any(self.folder.glob(_HEARTBEATS)) or bool(self.outcomes())

    def heartbeat(self, rank: int) -> Path:
        """Return the heartbeat file of `rank`."""
        return self.folder / f"heartbeat-rank-{rank:05d}"

    def stacks(self, rank: int) -> Path:
        """Return the file to which `rank` writes the Python stacks of its threads."""
        return self.folder / f"stacks-rank-{rank:05d}"

    @property
    def log(self) -> Path:
        """The file that holds every line the world printed."""
        return self.folder / "log.txt"

    def document(self) -> dict[str, Any]:
        """Return the content of job.json: "job", "run" and "attempt".

        Raises:
            WorldError: it is missing or has unexpected content.
        """
        if (document := self._read("job.json", job=dict, run=str, attempt=int)) is None:
            raise WorldError(f"{self.folder} is no session: it holds no job.json")
        return document

    def _read(self, name: str, **kinds: Kind) -> dict[str, Any] | None:
        """Return the document in the file `name`; None if there is none."""
        path = self.folder / name
        try:
            return decode_object(read_own(path), str(path), **kinds)
        except FileNotFoundError:
            return None
        except SnapshotDamaged as error:
            raise WorldError(str(error)) from error

    def write_outcome(self, outcome: Outcome) -> None:
        """Write how a rank ended; only the first outcome of each rank is written."""
        path = self.folder / f"outcome-rank-{outcome.rank:05d}.json"
        if not path.exists():
            _write(path, outcome.to_json())

    def outcomes(self) -> list[Outcome]:
        """Return the outcomes that ranks have written so far, then those of crashed ranks."""
        said = [Outcome.from_json(read_own(path), str(path)) for path in sorted(self.folder.glob(_OUTCOMES))]
        told = {outcome.rank for outcome in said}
        return said + [crash for crash in crashes_in(self.folder) if crash.rank not in told]

    def keep_unrecorded(self, outcome: Outcome, why: str) -> None:
        """Save an outcome that the store did not accept, and `why`; the next launch records it."""
        _write(self.folder / _UNRECORDED, json.dumps({"outcome": outcome.to_json(), "why": why}))

    def unrecorded(self) -> tuple[Outcome, str] | None:
        """Return the outcome of `keep_unrecorded`; None if it was never called."""
        if (kept := self._read(_UNRECORDED, outcome=str, why=str)) is None:
            return None
        return Outcome.from_json(kept["outcome"], str(self.folder / _UNRECORDED)), kept["why"]

    @property
    def ranks(self) -> int | None:
        """Number of ranks of the attempt; None if the job says it."""
        try:
            text = read_own(self.folder / "ranks")
        except FileNotFoundError:
            return None
        if not text.isdigit() or len(text) > _DIGITS:
            raise WorldError(f"{self.folder / 'ranks'} has unexpected content: {text!r:.80} is no number of ranks")
        return int(text)

    def begin_round(self, ranks: int) -> None:
        """Remove the files of the last round's ranks: the world has `ranks` new ones."""
        _write(self.folder / "ranks", str(ranks))
        for pattern in (_OUTCOMES, _HEARTBEATS, CRASHES):
            for path in self.folder.glob(pattern):
                path.unlink()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the session for this process until the block, or the process, ends."""
        with self._lock.open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def is_locked(self) -> bool:
        """Return whether the process that launches the world is still there."""
        try:
            with self._lock.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    @property
    def _lock(self) -> Path:
        return self.folder / "launcher.lock"

    def of_round(self, number: int) -> "Session":
        """Return the session that the ranks of a node have in one round: a folder in the node's."""
        return Session(self.folder / f"round-{number:05d}")

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _write(path: Path, text: str) -> None:
    with draft_of(path) as draft:
        draft.write_text(text, encoding="utf-8")
