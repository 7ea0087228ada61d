"""The names and sizes of the files in a folder, as a small record to compare with later."""

import json
from typing import Any

from midstride.engine.storage.checksums import digest_of
from midstride.engine.storage.store import Store

__all__ = ["FolderListing", "is_unchanged", "list_folder"]

#: {"folder": URL or None, "files": how many, "bytes": in all, "checksum": of names and sizes}
FolderListing = dict[str, Any]


def list_folder(url: str | None) -> FolderListing:
    """Return the listing of the folder at `url`; an empty one for None."""
    if url is None:
        return {"folder": None, "files": 0, "bytes": 0, "checksum": ""}
    store = Store.open(url)
    with store.errors_explained("read"):
        found = store.find()
    listing = json.dumps(found, sort_keys=True).encode()
    return {
        "folder": url,
        "files": len(found),
        "bytes": sum(found.values()),
        "checksum": digest_of([listing])["xxh3_128"],
    }


def is_unchanged(listing: FolderListing) -> bool:
    """Whether the names and sizes of the files are still those in `listing`."""
    return list_folder(listing["folder"]) == listing
