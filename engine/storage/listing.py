"""What a folder holds, by names and sizes: a small manifest to compare with later."""

import json
from typing import Any

from midstride.engine.storage.checksums import digest_of
from midstride.engine.storage.store import Store

__all__ = ["Manifest", "is_unchanged", "manifest_of"]

#: {"folder": URL or None, "files": how many, "bytes": in all, "checksum": of names and sizes}
Manifest = dict[str, Any]


def manifest_of(url: str | None) -> Manifest:
    """Return what is at `url` now; nothing is known of None."""
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


def is_unchanged(manifest: Manifest) -> bool:
    """Whether the data are as when `manifest` was made, as far as names and sizes tell."""
    return manifest_of(manifest["folder"]) == manifest
