"""JSON documents in a store, which end with a checksum of themselves."""

from typing import Any

from midstride.engine.errors import SnapshotDamaged
from midstride.engine.storage.checksums import decode_document
from midstride.engine.storage.store import Store

__all__ = ["read_document", "read_required_document"]


def read_document(store: Store, path: str, *keys: str) -> dict[str, Any]:
    """Return the document at `path`.

    Raises:
        FileNotFoundError: there is none.
        SnapshotDamaged: it is not what was written, or lacks some of `keys`.
    """
    with store.reading(path):
        return decode_document(store.read(path), f"{store.url}/{path}", *keys)


def read_required_document(store: Store, path: str, *keys: str, way_out: str) -> dict[str, Any]:
    """Return the document at `path`, which must be there.

    Raises:
        SnapshotDamaged: it is missing, not what was written, or lacks some of `keys`; the message ends with `way_out`.
    """
    try:
        return read_document(store, path, *keys)
    except FileNotFoundError as error:
        raise SnapshotDamaged(f"{store.url}/{path} is missing: {way_out}") from error
    except SnapshotDamaged as error:
        raise SnapshotDamaged(f"{error}: {way_out}") from error
