"""URLs of stores, as text: made absolute, and their faults."""

import os
import re
from pathlib import Path
from urllib.parse import urlsplit

__all__ = ["PASSWORD", "absolute_url", "holds_password", "url_fault"]

#: message on a URL with a password
PASSWORD = (
    "the URL holds a password, which would be stored in run.json, logs and the UI: remove it from the URL. "
    'Give it in the environment: FSSPEC_SFTP_PASSWORD for sftp://, as described by fsspec in "Configuration".'
)


def absolute_url(url: str, folder: Path | str = "") -> str:
    """Return `url` with its path made absolute against `folder` and ~ expanded.

    The default folder is the current one.

    >>> absolute_url("../runs/a", "/jobs/digits"), absolute_url("s3://bucket/a", "/jobs")
    ('/jobs/runs/a', 's3://bucket/a')
    >>> absolute_url("file://runs/a", "/jobs")
    '/jobs/runs/a'
    """
    scheme, mark, rest = url.partition("://")
    if mark and scheme not in ("file", "local"):
        return url
    url = rest if mark else url
    return os.path.abspath(Path(folder, os.path.expanduser(url)))  # noqa: PTH100, PTH111 (links and ~x stay)


def url_fault(url: str) -> str | None:
    """Return the fault of `url` if it would become a folder's name here; None without one.

    >>> url_fault("s3://")
    's3:// names no folder: write it out, as in s3://bucket/runs'
    """
    if half := re.match(r"([a-z][a-z0-9+]+:)/(?!/)", url):
        return f"{url} is a folder called {half[1]} here; a URL has two slashes: {half[1]}//"
    if re.fullmatch(r"[a-z][a-z0-9+]+:/{2,}", url):
        return f"{url} names no folder: write it out, as in {url}bucket/runs"
    return None


def holds_password(url: str) -> bool:
    """Whether `url` contains a password."""
    try:
        return urlsplit(url).password is not None
    except ValueError:
        return False
