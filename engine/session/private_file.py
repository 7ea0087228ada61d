"""Files in a folder that others can write to, such as that for temporary files: only this user's own are read."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

__all__ = ["is_own_folder", "open_own", "read_own"]


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
