"""Files and documents read from a store and compared with their checksums. Needs no torch."""

from collections.abc import Mapping
from typing import Any

from midstride.engine.errors import SnapshotDamaged, SnapshotMissing
from midstride.engine.storage.checksums import FileDigest, Kind, check_digest, check_size, decode_document, digest_of
from midstride.engine.storage.store import Store

__all__ = ["read_document", "read_required_document", "read_verified", "verify_files"]


def read_document(store: Store, path: str, /, **kinds: Kind) -> dict[str, Any]:
    """Return the document at `path`.

    Args:
        store: that holds it.
        path: of the document.
        kinds: keys that it must have, and the types of their values.

    Raises:
        FileNotFoundError: there is none.
        SnapshotDamaged: it has changed, or a key of `kinds` is missing or of another type.
    """
    with store.reading(path):
        return decode_document(store.read(path), f"{store.url}/{path}", **kinds)


def read_required_document(store: Store, path: str, /, way_out: str, **kinds: Kind) -> dict[str, Any]:
    """Return the document at `path`, which must be there; arguments as of `read_document`.

    Raises:
        SnapshotDamaged: it is missing, or as of `read_document`; the message ends with `way_out`.
    """
    try:
        return read_document(store, path, **kinds)
    except FileNotFoundError as error:
        raise SnapshotDamaged(f"{store.url}/{path} is missing: {way_out}") from error
    except SnapshotDamaged as error:
        raise SnapshotDamaged(f"{error}: {way_out}") from error


def read_verified(store: Store, path: str, expected: FileDigest) -> bytes:
    """Return the bytes of a file whose manifest says `expected`.

    Raises:
        SnapshotDamaged: the file is missing or differs; it is named with both values.
    """
    where = f"{store.url}/{path}"
    try:
        with store.reading(path):
            data = store.read(path)
    except FileNotFoundError as error:
        raise SnapshotDamaged(f"{where} is missing, its manifest says {expected['bytes']} bytes") from error
    check_digest(where, expected, digest_of([data]))
    return data


def verify_files(store: Store, manifest: str, files: Mapping[str, FileDigest], *, sizes_only: bool = False) -> None:
    """Compare `files` beside `manifest` with its sizes and checksums.

    Args:
        store: of the run.
        manifest: its path, asked for only where a file is missing.
        files: name -> size and checksum.
        sizes_only: compare only sizes, by one listing of the folder.

    Raises:
        SnapshotDamaged: a file is missing or differs; it is named with both values.
        SnapshotMissing: the manifest is gone, too: all of it was removed meanwhile.
    """
    folder = manifest.rpartition("/")[0]
    sizes: dict[str, int] = {}
    if sizes_only:
        with store.reading(folder):
            sizes = store.find(folder)
    for name, expected in files.items():
        path = f"{folder}/{name}"
        where = f"{store.url}/{path}"
        try:
            if sizes_only:
                if name not in sizes:
                    raise FileNotFoundError(path)
                check_size(where, expected, sizes[name])
                continue
            with store.reading(path):
                found = digest_of(store.stream(path))
        except FileNotFoundError as error:
            if not store.exists(manifest):
                raise SnapshotMissing(
                    f"{store.url}/{manifest} was removed during the verification: try again"
                ) from error
            raise SnapshotDamaged(f"{where} is missing, its manifest says {expected['bytes']} bytes") from error
        check_digest(where, expected, found)
