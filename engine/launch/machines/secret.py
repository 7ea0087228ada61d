"""Secret of a run on several machines, known to its participants. Needs no torch.

It is in a file that only its user can read, or in the environment. It is never on a command line, in a log, in an
event or in the run's folder.
"""

import hashlib
import os
import secrets
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from midstride.engine.errors import JobError
from midstride.engine.runs.run import Run
from midstride.engine.session.private_file import own_secret, read_secret_file

__all__ = ["VARIABLE", "RunSecret", "read_secret"]

#: environment variable that may hold the secret
VARIABLE = "MIDSTRIDE_SECRET"
_BYTES = 32
#: a shorter one could be guessed
_LEAST_CHARACTERS = 32


@dataclass(frozen=True)
class RunSecret:
    """The secret of a run, and how a person gives it to `midstride join`.

    Args:
        text: the secret.
        file: that keeps it for the next attempt; None if the environment or a cluster gives it to the nodes.
    """

    text: str
    file: Path | None = None

    @classmethod
    def of(cls, run: Run) -> Self:
        """Return the secret of `run`: the environment's, an earlier attempt's, or a new one.

        Raises:
            JobError: it is too short, its file cannot be written, or others can read it.
        """
        if VARIABLE in os.environ:
            return cls(read_secret(None))
        if run.job.world.on != "join":  # the cluster's own means give it to the nodes
            return cls(secrets.token_hex(_BYTES))
        state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
        name = f"{run.name}-{hashlib.sha256(run.url.encode()).hexdigest()[:12]}"
        file = state / "midstride" / "secrets" / name
        return cls(_kept(file), file)

    @property
    def option(self) -> str:
        """The option of `midstride join` that names the file; "" if there is none."""
        return "" if self.file is None else f" --secret-file {shlex.quote(str(self.file))}"

    @property
    def remark(self) -> str:
        """Hint on how a node gets the secret if no file has it."""
        return f", with this machine's {VARIABLE}" if self.file is None else ""

    def forget(self) -> None:
        """Remove the file: the run is done."""
        if self.file is not None:
            self.file.unlink(missing_ok=True)


def _kept(file: Path) -> str:
    """Return the secret in `file`; a new one is written if there is none."""
    try:
        return own_secret(file)
    except OSError as error:
        raise JobError(
            f"the secret of this run cannot be kept in {file}: {error.strerror}. Name another folder in "
            f"XDG_STATE_HOME, or set {VARIABLE} here and on every machine"
        ) from error


def read_secret(file: Path | None) -> str:
    """Return the secret in `file` or the environment, and remove it from the environment.

    Raises:
        JobError: there is none, others can read the file, or it is no secret.
    """
    given = os.environ.pop(VARIABLE, "")
    if file is None and not given:
        raise JobError(
            f"the run's secret is missing: pass --secret-file FILE, as the launcher prints it, or set {VARIABLE}"
        )
    secret = given if file is None else _content(file)
    if len(secret) < _LEAST_CHARACTERS or not secret.isascii() or not secret.isprintable():
        where = VARIABLE if file is None else file
        raise JobError(f"{where}: is not a secret: at least {_LEAST_CHARACTERS} characters in one line are needed")
    return secret


def _content(file: Path) -> str:
    try:
        return read_secret_file(file)
    except OSError as error:
        raise JobError(f"--secret-file {file}: {error.strerror}") from error
