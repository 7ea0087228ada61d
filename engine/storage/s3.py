"""S3 and compatible servers through s3fs: conditional puts, multipart uploads, clear errors.

Credentials, endpoint and region come from the usual places: the environment (AWS_ACCESS_KEY_ID, AWS_PROFILE,
AWS_ENDPOINT_URL, ...), ~/.aws, the machine's role, or fsspec's own configuration.
"""

import contextlib
import errno
import io
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

from midstride.engine.errors import EngineError
from midstride.engine.storage.fsspec_store import RemoteStore
from midstride.engine.storage.retry import chain_of

__all__ = ["S3Store"]

T = TypeVar("T")

#: of one part; S3 takes at most 10,000 parts, so larger files get larger parts
_PART_BYTES = 8 * 2**20
_MOST_PARTS = 10_000
_PARTS_AT_ONCE = 8
#: in one request
_MOST_DELETED = 1_000
_CONNECT_TIMEOUT_S = 5
_READ_TIMEOUT_S = 30
#: who created a file, in its metadata
_WRITER = "midstride-writer"
#: codes with which a server answers the losers of a conditional put
_LOST = ("PreconditionFailed", "ConditionalRequestConflict")
#: codes of a server that is too busy or is starting
_BUSY = ("SlowDown", "RequestTimeout", "ServiceUnavailable", "InternalError", "Throttling", "ThrottlingException")
#: codes of a server without space: MinIO's disks, MinIO's quota, Ceph's quota
_FULL = ("XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "QuotaExceeded")
#: code of a server -> way out
_WAYS_OUT = {
    "NoSuchBucket": "Create the bucket",
    "AccessDenied": "Allow s3:GetObject, s3:PutObject, s3:DeleteObject and s3:ListBucket there",
    "PermanentRedirect": "Set AWS_REGION to the bucket's region",
    "AuthorizationHeaderMalformed": "Set AWS_REGION to the bucket's region",
    "ExpiredToken": "Renew AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, or those of AWS_PROFILE",
    "RequestTimeTooSkewed": "Set the clock of this machine right",
}
_CREDENTIALS = "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
_ENDPOINT = "Set AWS_ENDPOINT_URL to where the server is"


class S3Store(RemoteStore):
    """A prefix in a bucket."""

    @property
    def _files(self) -> Any:
        import fsspec.config
        from botocore.handlers import add_expect_header

        configured = fsspec.config.conf.get("s3", {})
        config = {
            "connect_timeout": _CONNECT_TIMEOUT_S,
            "read_timeout": _READ_TIMEOUT_S,
            # The retries are ours. Also, botocore's pauses draw from the global generator of `random`.
            "retries": {"total_max_attempts": 1},
            **({"s3": {"addressing_style": "path"}} if _has_endpoint(configured) else {}),
            **configured.get("config_kwargs", {}),
        }
        files = fsspec.filesystem("s3", use_listings_cache=False, config_kwargs=config)
        files.retries = 1
        # aiohttp waits without limit for the "100 Continue" of a server that does not answer: none is asked for.
        files.s3.meta.events.unregister("before-call.s3", add_expect_header)
        return files

    def _retried(self, act: Callable[[], T]) -> T:
        def translated() -> T:
            try:
                return act()
            except EngineError:
                raise  # a check's
            except Exception as error:
                raise _as_os_error(error) from error

        return super()._retried(translated)

    def _put(self, full: str, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        part_bytes = max(_PART_BYTES, -(-len(view) // _MOST_PARTS))
        if len(view) < 2 * part_bytes:
            self._files.pipe_file(full, bytes(view), chunksize=part_bytes)
            return
        try:
            self._put_parts(full, view, part_bytes)
        except BaseException:
            with contextlib.suppress(Exception):  # its parts are never seen, but they are paid for
                self._abort_uploads(full)
            raise

    def _put_parts(self, full: str, view: memoryview, part_bytes: int) -> None:
        files = self._files
        bucket, key, _ = files.split_path(full)
        upload = {"Bucket": bucket, "Key": key}
        upload["UploadId"] = files.call_s3("create_multipart_upload", **upload)["UploadId"]

        def put(number: int) -> dict[str, Any]:
            # Of a file, a little at a time is handed to the socket; of bytes, asyncio keeps a copy until all are sent.
            body = io.BytesIO(view[(number - 1) * part_bytes : number * part_bytes])
            answer = files.call_s3("upload_part", PartNumber=number, Body=body, **upload)
            return {"PartNumber": number, "ETag": answer["ETag"]}

        with ThreadPoolExecutor(_PARTS_AT_ONCE) as pool:
            parts = [*pool.map(put, range(1, 1 + -(-len(view) // part_bytes)))]
        files.call_s3("complete_multipart_upload", MultipartUpload={"Parts": parts}, **upload)

    def write(self, path: str, data: bytes | memoryview, *, check: Callable[[], None] | None = None) -> None:
        """Write a whole file. With `check`, only if the file has not changed since that call.

        So a delayed request of a superseded world cannot overwrite files of the newer world.
        """
        if check is None or self.options.lease == "none":
            super().write(path, data, check=check)
            return
        full, ask = self._full(path), check

        def put() -> None:
            before = self._etag(full)
            ask()
            self._put_over(full, bytes(data), before)

        self._retried(put)

    def _put_over(self, full: str, data: bytes, before: str | None) -> None:
        """Write a file if its ETag is still `before`; with None, if there is still no file."""
        bucket, key, _ = self._files.split_path(full)
        condition = {"IfNoneMatch": "*"} if before is None else {"IfMatch": before}
        try:
            self._files.call_s3("put_object", Bucket=bucket, Key=key, Body=data, **condition)
        except Exception as error:
            if _code(error) == "NotImplemented":  # no server without it keeps a late request from being done
                self._put(full, data)
            elif isinstance(error, FileNotFoundError) or _code(error) in _LOST:
                raise ConnectionError(f"{full} was put or removed by another meanwhile") from error
            else:
                raise

    def _etag(self, full: str) -> str | None:
        try:
            return str(self._head(full)["ETag"])
        except FileNotFoundError:
            return None

    def create(self, path: str, data: bytes) -> bool:
        """Put a file by a conditional put (If-None-Match: *)."""
        if self.options.lease == "none":
            return super().create(path, data)
        full, writer = self._full(path), uuid4().hex

        def put() -> bool:
            try:
                self._files.pipe_file(full, data, mode="create", Metadata={_WRITER: writer})
            except OSError as error:
                # The file can be ours, put at a try whose answer was lost. (aiohttp tries again by itself.)
                if isinstance(error, FileExistsError) or _code(error) in _LOST:
                    return self._writer_of(full) == writer
                raise
            return True

        return self._retried(put)

    def read(self, path: str) -> bytes:
        """Return a whole file, in one request unless files of its kind can be large."""
        if path.endswith(".safetensors"):
            return b"".join(self.stream(path))
        return self._retried(lambda: bytes(self._files.cat_file(self._full(path), max_concurrency=1)))

    def stream(self, path: str, ranges: Sequence[tuple[int, int]] | None = None) -> Iterator[bytes]:
        """Return a file, or ranges of its bytes, in chunks; a few are fetched ahead."""
        files, full = self._files, self._full(path)
        parts = [
            (start, min(last, start + _PART_BYTES))
            for first, last in ([(0, self.size(path))] if ranges is None else ranges)
            for start in range(first, last, _PART_BYTES)
        ]
        ahead: dict[int, Future[bytes]] = {}

        def fetched(number: int) -> bytes:
            for later in range(number, min(len(parts), number + _PARTS_AT_ONCE)):
                if later not in ahead:
                    start, end = parts[later]
                    ahead[later] = pool.submit(files.cat_file, full, start=start, end=end)
            try:
                return ahead.pop(number).result()
            except Exception:
                ahead.clear()  # the next try requests the failed parts again
                raise

        with ThreadPoolExecutor(_PARTS_AT_ONCE) as pool:
            for number in range(len(parts)):
                yield self._retried(lambda: fetched(number))  # noqa: B023 - called at once

    def _writer_of(self, full: str) -> str | None:
        metadata: dict[str, str] = self._head(full)["Metadata"]
        return metadata.get(_WRITER)

    def list(self, path: str = "") -> list[str]:
        """Return the names in a folder, in one request also where there is none."""
        try:
            found = self._retried(lambda: self._names(self._full(path)))
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(name for name in found if name and not name.startswith("."))

    def _names(self, full: str) -> set[str]:
        files, names = self._files, set[str]()
        bucket, prefix, _ = files.split_path(full)
        prefix = f"{prefix.rstrip('/')}/" if prefix else ""
        wanted = {"Bucket": bucket, "Prefix": prefix, "Delimiter": "/"}
        while True:
            answer = files.call_s3("list_objects_v2", **wanted)
            names |= {one["Key"] for one in answer.get("Contents") or ()}
            names |= {one["Prefix"] for one in answer.get("CommonPrefixes") or ()}
            if not answer.get("IsTruncated"):
                return {name.removeprefix(prefix).rstrip("/") for name in names}
            wanted["ContinuationToken"] = answer["NextContinuationToken"]

    def size(self, path: str) -> int:
        """Return the bytes of a file, in one request also where there is none."""
        return int(self._retried(lambda: self._head(self._full(path)))["ContentLength"])

    def _head(self, full: str) -> dict[str, Any]:
        """Return the server's metadata of a file. Raises FileNotFoundError if it does not exist."""
        bucket, key, _ = self._files.split_path(full)
        found: dict[str, Any] = self._files.call_s3("head_object", Bucket=bucket, Key=key)
        return found

    def remove(self, path: str) -> None:
        """Remove a file or a folder, and abort the uploads below it."""
        super().remove(path)
        self._retried(lambda: self._abort_uploads(self._full(path)))

    def remove_known(self, path: str, *files: Sequence[str]) -> None:
        """Remove the files of a folder in a request for each group, without looking for others."""
        for group in files:
            self._retried(lambda: self._delete([f"{path}/{file}" for file in group]))  # noqa: B023 - called at once

    def _delete(self, paths: Sequence[str]) -> None:
        files, bucket = self._files, self._files.split_path(self.url)[0]
        keys = [{"Key": files.split_path(self._full(path))[1]} for path in paths]
        for start in range(0, len(keys), _MOST_DELETED):
            wanted = {"Objects": keys[start : start + _MOST_DELETED], "Quiet": True}
            if errors := files.call_s3("delete_objects", Bucket=bucket, Delete=wanted).get("Errors"):
                raise OSError(f"{errors[0].get('Key')} was not removed: {errors[0].get('Code')}")

    def remove_drafts(self, *folders: str, upto: str | None = None) -> None:
        """Abort the uploads of files directly in `folders`."""
        prefix = self._files.split_path(self.url)[1].rstrip("/") + "/"
        for upload in self._retried(lambda: self._uploads(self.url)):
            folder, _, file = upload["Key"].removeprefix(prefix).rpartition("/")
            if folder in folders and (upto is None or file <= upto):
                self._retried(lambda: self._abort(upload))  # noqa: B023 - called at once

    def unfinished(self, path: str) -> Sequence[str]:
        """Return the names below `path` with uploads that were neither completed nor aborted."""
        _, prefix, _ = self._files.split_path(f"{self._full(path)}/")
        prefix = prefix.rstrip("/") + "/"
        keys = [upload["Key"] for upload in self._retried(lambda: self._uploads(self._full(path)))]
        return sorted({key.removeprefix(prefix).partition("/")[0] for key in keys if key.startswith(prefix)})

    def _uploads(self, full: str) -> Sequence[dict[str, Any]]:
        bucket, prefix, _ = self._files.split_path(full)
        answer = self._files.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix)
        return [upload for upload in answer.get("Uploads") or () if f"{upload['Key']}/".startswith(f"{prefix}/")]

    def _abort_uploads(self, full: str) -> None:
        for upload in self._uploads(full):
            self._abort(upload)

    def _abort(self, upload: dict[str, Any]) -> None:
        wanted = {"Bucket": self._files.split_path(self.url)[0], "Key": upload["Key"], "UploadId": upload["UploadId"]}
        with contextlib.suppress(FileNotFoundError):  # it was aborted elsewhere
            self._files.call_s3("abort_multipart_upload", **wanted)

    def is_transient(self, error: BaseException) -> bool:
        """Whether a later try can succeed after `error`."""
        if isinstance(root := _root(error), socket.gaierror):
            return _may_be_found_later(root)  # any other says that there is no such host
        return super().is_transient(error)

    def _way_out(self, error: OSError) -> str:
        if isinstance(_root(error), socket.gaierror):
            return _ENDPOINT
        return _WAYS_OUT.get(_code(error), _CREDENTIALS)


def _has_endpoint(configured: dict[str, Any]) -> bool:
    names = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")
    return "endpoint_url" in configured or any(os.environ.get(name) for name in names)


def _code(error: BaseException) -> str:
    """Return the error code of the server; an empty text if the error is not the server's."""
    for link in chain_of(error):
        response = getattr(link, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code", ""))
    return ""


def _root(error: BaseException) -> BaseException:
    """Return the first cause of `error`; botocore keeps causes in an attribute."""
    while (cause := error.__cause__ or getattr(error, "kwargs", {}).get("error")) is not None:
        if not isinstance(cause, BaseException):
            break
        error = cause
    return getattr(error, "os_error", error)  # aiohttp's


def _as_os_error(error: Exception) -> OSError:
    """Return the built-in error that corresponds to `error`, of s3fs or botocore."""
    from botocore.exceptions import BotoCoreError, HTTPClientError
    from botocore.exceptions import ConnectionError as NotConnected

    if _code(error) in _BUSY:
        return ConnectionError(f"the server is busy: {error}")
    if isinstance(error, (NotConnected, HTTPClientError)):  # some of them are an OSError too
        return ConnectionError(_unanswered(error))
    if isinstance(error, OSError):
        return _named(error)
    if isinstance(error, BotoCoreError):
        return PermissionError(str(error).rstrip("."))
    return OSError(f"{type(error).__name__}: {error}")


def _unanswered(error: Any) -> str:
    """Return a message with the endpoint that did not answer, and why."""
    endpoint = urlsplit(str(error.kwargs.get("endpoint_url", "")))
    if not endpoint.hostname:
        return str(error)
    root = _root(error)
    if isinstance(root, socket.gaierror) and not _may_be_found_later(root):
        return f"there is no host {endpoint.hostname}"
    why = root.strerror if isinstance(root, OSError) and root.strerror else type(error).__name__
    return f"{endpoint.scheme}://{endpoint.netloc}: {why}"


def _may_be_found_later(error: socket.gaierror) -> bool:
    return error.errno == socket.EAI_AGAIN


def _named(error: OSError) -> OSError:
    """Return `error` with the error code of the server in front of its message."""
    code = _code(error)
    if code == "NoSuchBucket":  # not a file that is missing
        return OSError(f"{code}: the bucket does not exist")
    said = error.strerror or str(error)
    text = f"{code}: {said}".rstrip(".") if code and code not in said else said
    if code in _FULL:
        return OSError(errno.ENOSPC, text.rstrip("."))
    return type(error)(*(argument for argument in (error.errno, text) if argument is not None))
