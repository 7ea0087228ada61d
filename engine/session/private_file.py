"""Files in a folder that others can write to, such as that for temporary files: only this user's own are read."""

import errno
import os
import secrets
import stat
import tempfile
from pathlib import Path
from typing import BinaryIO

__all__ = ["is_own_folder", "open_own", "own_secret", "read_own", "read_secret_file"]


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
    """Return what is in a file that `open_own` opens."""
    with open_own(path) as file:
        return file.read()


def own_secret(path: Path) -> str:
    """Return the secret in the file `path`; if there is none, 256 random bits are written into a new one.

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
