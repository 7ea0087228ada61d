"""Files that other users of this machine cannot put in our way, read or write."""

import errno
import os
import secrets
import stat
import sys
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Self

from midstride.engine.errors import WorldError

__all__ = ["AnonymousFile", "is_own_folder", "open_own", "own_folder", "own_secret", "read_own", "read_secret_file"]


class AnonymousFile:
    """Empty file for processes of this user only, removed when its last holder ends.

    On Linux it has no name in any folder; elsewhere it is a temporary file.
    """

    def __init__(self) -> None:
        if sys.platform == "linux":
            self._keep(os.memfd_create("midstride"), None)
        else:
            self._keep(*tempfile.mkstemp(prefix="midstride-"))

    @classmethod
    def at(cls, path: str) -> Self:
        """Return the file at `path`, named by its holder; this process becomes a holder, too.

        Raises:
            WorldError: no process holds it any more.
        """
        file = cls.__new__(cls)
        try:
            file._keep(os.open(path, os.O_RDWR | os.O_CLOEXEC), None)
        except OSError as error:
            raise WorldError(f"the process that held {path} has ended: {error.strerror}") from error
        file.path = path if sys.platform != "linux" else file.path
        return file

    def _keep(self, handle: int, name: str | None) -> None:
        #: descriptor of the open file
        self.handle = handle
        #: path by which processes of this user open the file as long as this process has it open
        self.path = name or f"/proc/{os.getpid()}/fd/{handle}"
        # At the end of the process the system closes it: its number must not become that of another file before.
        weakref.finalize(self, _close, handle, name, os.getpid()).atexit = name is not None


def _close(handle: int, name: str | None, maker: int) -> None:
    os.close(handle)
    if name is not None and os.getpid() == maker:  # and no fork of it
        Path(name).unlink(missing_ok=True)


def own_folder() -> Path:
    """Return a folder for short-lived files, which no other user of this machine can enter.

    Raises:
        OSError: none can be made.
    """
    name = f".midstride-{os.geteuid()}"
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    for folder in (Path(tempfile.gettempdir(), name), state / "midstride" / os.uname().nodename):
        with suppress(FileExistsError):  # it may be anything, and anyone's
            folder.mkdir(mode=0o700, parents=True)
        if is_own_folder(folder) and not folder.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            return folder
    raise PermissionError(errno.EPERM, "is open to other users of this machine", str(folder))


def is_own_folder(path: Path) -> bool:
    """Whether `path` is a folder of this user, and no link to one."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def open_own(path: Path) -> BinaryIO:
    """Open a regular file of this user for reading; a FIFO in its place blocks no reader.

    Raises:
        FileNotFoundError: it is not there.
        PermissionError: it is something else, or of another user.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:  # a link, a socket
        raise PermissionError(errno.EPERM, f"no file of this user: {error.strerror}", str(path)) from error
    status = os.fstat(handle)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
        return os.fdopen(handle, "rb")
    os.close(handle)
    raise PermissionError(errno.EPERM, "no regular file of this user", str(path))


def read_own(path: Path) -> bytes:
    """Return the content of a file that `open_own` opens."""
    with open_own(path) as file:
        return file.read()


def own_secret(path: Path) -> str:
    """Return the secret in the file `path`; without one, write 256 random bits into it.

    Raises:
        OSError: the file cannot be written, or others can read it.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, draft = tempfile.mkstemp(dir=path.parent)  # with mode 0600
        with os.fdopen(handle, "w") as file:
            file.write(secrets.token_hex(32))
        try:
            os.link(draft, path)  # whole, and only if no other process was faster
        except FileExistsError:
            pass
        finally:
            Path(draft).unlink()
    return read_secret_file(path)


def read_secret_file(path: Path) -> str:
    """Return the text in a file that only this user can read.

    Raises:
        OSError: it is missing, no regular file of this user, others can read it, or it holds no text.
    """
    with open_own(path) as file:
        if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & (stat.S_IRWXG | stat.S_IRWXO):
            raise PermissionError(errno.EACCES, f"others can read it: chmod 600 {path}", str(path))
        try:
            return file.read().decode().strip()
        except UnicodeDecodeError:
            raise PermissionError(errno.EINVAL, "is no text", str(path)) from None
