"""Checksums of files and blocks, and JSON documents that end with their own checksum.

A file's checksum is that of the checksums of its blocks. So a reader of single blocks can verify them by the list of
these, and the list by the file's checksum.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

from xxhash import xxh3_128, xxh3_128_digest, xxh3_128_hexdigest

from midstride.engine.errors import SnapshotDamaged

__all__ = [
    "BLOCK_BYTES",
    "DIGEST_BYTES",
    "NUMBER",
    "BlockDigests",
    "FileDigest",
    "Kind",
    "check_digest",
    "check_kinds",
    "check_size",
    "decode_document",
    "decode_object",
    "digest_of",
    "digest_of_blocks",
    "encode_document",
]

#: of a block; small, since a rank that needs some rows of a tensor reads the blocks around them, too
BLOCK_BYTES = 64 * 2**10
#: of the checksum of a block
DIGEST_BYTES = 16

#: the type of a value in a document, or several
Kind = type | tuple[type, ...]
#: of seconds and other numbers that can be whole
NUMBER = (float, int)
#: digests of documents that were found to be whole: who resumes a run reads its manifests several times
_known_whole: set[bytes] = set()
_JSON_NAMES = {bool: "a boolean", int: "an integer", float: "a number", str: "text", list: "a list", dict: "an object"}


class FileDigest(TypedDict):
    """Size and checksum of a file, as a manifest has them."""

    bytes: int
    xxh3_128: str


class BlockDigests:
    """Checksums of the blocks of a file, or of a range of blocks, as the bytes arrive."""

    def __init__(self) -> None:
        self.bytes = 0
        self._whole, self._open = bytearray(), xxh3_128()

    def update(self, chunk: bytes | memoryview) -> None:
        """Add the next bytes."""
        view = memoryview(chunk)
        if inside := self.bytes % BLOCK_BYTES:
            head, view = view[: BLOCK_BYTES - inside], view[BLOCK_BYTES - inside :]
            self._open.update(head)
            self.bytes += len(head)
            if self.bytes % BLOCK_BYTES == 0:
                self._whole += self._open.digest()
        end = len(view) // BLOCK_BYTES * BLOCK_BYTES
        self._whole += b"".join([xxh3_128_digest(view[at : at + BLOCK_BYTES]) for at in range(0, end, BLOCK_BYTES)])
        if rest := view[end:]:
            self._open = xxh3_128(rest)
        self.bytes += len(view)

    @property
    def table(self) -> bytes:
        """The checksums, of 16 bytes each, of the blocks so far; the last block can be shorter."""
        return bytes(self._whole) + (self._open.digest() if self.bytes % BLOCK_BYTES else b"")

    @property
    def of_file(self) -> FileDigest:
        """Size and checksum of a file that consists of these blocks."""
        return digest_of_blocks(self.bytes, self.table)


def digest_of_blocks(size: int, table: bytes) -> FileDigest:
    """Return the digest of a file of `size` bytes with the blocks' checksums in `table`."""
    return {"bytes": size, "xxh3_128": xxh3_128_hexdigest(table)}


def digest_of(chunks: Iterable[bytes | memoryview]) -> FileDigest:
    """Return size and checksum of a file that consists of `chunks`."""
    digests = BlockDigests()
    for chunk in chunks:
        digests.update(chunk)
    return digests.of_file


def check_digest(path: str, expected: FileDigest, found: FileDigest) -> None:
    """Compare the file at `path` with its manifest.

    Raises:
        SnapshotDamaged: size or checksum differs; both values are in the message.
    """
    check_size(path, expected, found["bytes"])
    if expected["xxh3_128"] != found["xxh3_128"]:
        raise SnapshotDamaged(f"{path} has checksum {found['xxh3_128']}, its manifest says {expected['xxh3_128']}")


def check_size(path: str, expected: FileDigest, found: int) -> None:
    """Compare the size of the file at `path`, in bytes, with its manifest.

    Raises:
        SnapshotDamaged: it differs; both values are in the message.
    """
    if expected["bytes"] != found:
        raise SnapshotDamaged(f"{path} has {found} bytes, its manifest says {expected['bytes']}")


def encode_document(document: dict[str, Any]) -> bytes:
    """Return `document` as JSON with a line per key, and a checksum of the rest at the end."""
    plain = json.loads(json.dumps(document))  # as a reader sees it: keys are text, tuples are lists
    return _in_lines(_sealed(plain))


def _sealed(plain: dict[str, Any]) -> dict[str, Any]:
    rest = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return {**plain, "checksum": xxh3_128(rest.encode()).hexdigest()}


def _in_lines(document: dict[str, Any]) -> bytes:
    lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in document.items())
    return "{{\n{}\n}}\n".format(",\n".join(lines)).encode()


def _is_whole(data: bytes) -> bool:
    if (digest := xxh3_128_digest(data)) in _known_whole:
        return True
    document = json.loads(data)
    del document["checksum"]
    if data != _in_lines(_sealed(document)):
        return False
    _known_whole.add(digest)
    return True


def decode_document(data: bytes, path: str, /, **kinds: Kind) -> dict[str, Any]:
    """Return the document that `encode_document` made `data` of.

    Raises:
        SnapshotDamaged: a byte has changed, or a key of `kinds` is missing or of another type.
    """
    try:
        document = json.loads(data)
        checksum = document.pop("checksum")
        whole = _is_whole(data)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SnapshotDamaged(f"{path} is no JSON document with a checksum: {error}") from error
    if not whole:
        raise SnapshotDamaged(f"{path} does not match its own checksum {checksum}")
    if missing := [key for key in kinds if key not in document]:
        raise SnapshotDamaged(f"{path} holds another document: it says nothing of {', '.join(missing)}")
    check_kinds(document, path, **kinds)
    return dict(document)


def decode_object(data: bytes, path: str, /, **kinds: Kind) -> dict[str, Any]:
    """Return the JSON object in `data`, which has no checksum.

    Raises:
        SnapshotDamaged: it is none, or a key of `kinds` is missing or of another type.
    """
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise SnapshotDamaged(f"{path} has unexpected content: no JSON: {error}") from error
    if not isinstance(document, dict):
        raise SnapshotDamaged(f"{path} has unexpected content: an object is needed, not {document!r:.80}")
    if missing := [key for key in kinds if key not in document]:
        raise SnapshotDamaged(f"{path} holds another document: it says nothing of {', '.join(missing)}")
    check_kinds(document, path, **kinds)
    return document


def check_kinds(document: Mapping[str, Any], path: str, /, **kinds: Kind) -> None:
    """Compare the types of values in a document; keys that are not there are left out.

    Raises:
        SnapshotDamaged: naming the key, its value and its allowed types.
    """
    for key, kind in kinds.items():
        value, allowed = document.get(key), kind if isinstance(kind, tuple) else (kind,)
        if key not in document or type(value) in allowed:
            continue
        names = " or ".join("null" if one is type(None) else _JSON_NAMES[one] for one in allowed)
        raise SnapshotDamaged(f"{path} has unexpected content: {key} is {value!r:.80} instead of {names}")
