"""Checksums: what a file must be, and JSON documents that guard themselves."""

import json
from collections.abc import Iterable
from typing import Any, TypedDict

from xxhash import xxh3_128

from midstride.engine.errors import SnapshotDamaged

__all__ = ["FileFacts", "check_facts", "facts_of", "seal", "unseal"]


class FileFacts(TypedDict):
    """What a manifest says of one file."""

    bytes: int
    xxh3_128: str


def facts_of(chunks: Iterable[bytes | memoryview]) -> FileFacts:
    """Return the facts of a file that consists of `chunks`."""
    size, digest = 0, xxh3_128()
    for chunk in chunks:
        size += len(chunk)
        digest.update(chunk)
    return {"bytes": size, "xxh3_128": digest.hexdigest()}


def check_facts(path: str, expected: FileFacts, found: FileFacts) -> None:
    """Compare the file at `path` with its manifest.

    Raises:
        SnapshotDamaged: size or checksum differs; both values are in the message.
    """
    if expected["bytes"] != found["bytes"]:
        raise SnapshotDamaged(f"{path} has {found['bytes']} bytes, its manifest says {expected['bytes']}")
    if expected["xxh3_128"] != found["xxh3_128"]:
        raise SnapshotDamaged(f"{path} has checksum {found['xxh3_128']}, its manifest says {expected['xxh3_128']}")


def seal(document: dict[str, Any]) -> bytes:
    """Return `document` as JSON that ends with a checksum of the rest."""
    plain = json.loads(json.dumps(document))  # what a reader will see: keys are text, tuples are lists
    rest = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return json.dumps({**plain, "checksum": xxh3_128(rest.encode()).hexdigest()}, indent=1).encode() + b"\n"


def unseal(data: bytes, path: str, *keys: str) -> dict[str, Any]:
    """Return the document that `seal` made `data` of.

    Raises:
        SnapshotDamaged: a single byte differs from what was written, or it is a document without some of `keys`.
    """
    try:
        document = json.loads(data)
        checksum = document.pop("checksum")
        whole = seal(document) == data
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SnapshotDamaged(f"{path} is not a sealed document: {error}") from error
    if not whole:
        raise SnapshotDamaged(f"{path} does not match its own checksum {checksum}")
    if missing := [key for key in keys if key not in document]:
        raise SnapshotDamaged(f"{path} holds another document: it says nothing of {', '.join(missing)}")
    return dict(document)
