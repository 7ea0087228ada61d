"""A snapshot whose files a test changes on purpose."""

import base64
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

WEIGHT = torch.randn(3, 4)


STATE: dict[str, Any] = {
    "module": {"weight": WEIGHT, "tied": WEIGHT, "row": WEIGHT[1], "turned": torch.randn(4, 5).t()},
    "masks": [torch.tensor([True, False]), torch.ones(1).expand(3, 7), torch.eye(3).to_sparse()],
    "arrays": [np.arange(6).reshape(2, 3), np.ones(2, [("a", "<f4"), ("b", "<i8", (2,))]), np.float32(1.5)],
    "plain": [1 + 2j, b"bytes", (1, 2), {3}, {4: "four"}, float("inf"), torch.bfloat16, torch.device("cpu")],
}


RANK = "rank-00000-of-00001"


class Parts:
    """The two files of a rank and the manifest, to be changed and put back with the right checksums."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
        self.part: dict[str, Any] = json.loads((folder / f"{RANK}.json").read_text())
        data = (folder / f"{RANK}.safetensors").read_bytes()
        length = int.from_bytes(data[:8], "little")
        self.length: int | None = None  # that the file says its header has
        self.tree: str | None = None  # written in the tree's place
        self.header: dict[str, Any] = json.loads(data[8 : 8 + length])
        self.body = data[8 + length :]

    @property
    def entries(self) -> dict[str, Any]:
        """What stands for each tensor."""
        return self.part["tree"]["module"]

    def write(self) -> None:
        header = json.dumps(self.header).encode()
        length = len(header) if self.length is None else self.length
        tensors = struct.pack("<Q", length) + header + self.body
        self.part["blocks"] = base64.b64encode(_blocks(tensors)).decode()
        files = {
            f"{RANK}.json": json.dumps(self.part if self.tree is None else self.part | {"tree": 0}).encode(),
            f"{RANK}.safetensors": tensors,
        }
        if self.tree is not None:
            files[f"{RANK}.json"] = files[f"{RANK}.json"].replace(b'"tree": 0', f'"tree": {self.tree}'.encode())
        for name, data in files.items():
            (self.folder / name).write_bytes(data)
            if isinstance(self.manifest.get("files"), dict) and name in self.manifest["files"]:
                facts = {"bytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(_blocks(data))}
                self.manifest["files"][name] = facts
        self.manifest.pop("checksum", None)
        plain = json.dumps(self.manifest, sort_keys=True, separators=(",", ":"))
        sealed = {**self.manifest, "checksum": xxhash.xxh3_128_hexdigest(plain.encode())}
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in sealed.items())
        (self.folder / "manifest.json").write_text(f"{{\n{lines}\n}}\n")


def _blocks(data: bytes) -> bytes:
    return b"".join(xxhash.xxh3_128_digest(data[at : at + 65536]) for at in range(0, len(data), 65536))
