"""docs/snapshot-format.md: a snapshot of a real fit, read by the words of that page with json and safetensors alone."""

import base64
import builtins
import json
import math
import re
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from safetensors.torch import load_file
from support.limit import LIMIT_S

from midstride.engine.objects.kinds.table import KINDS
from midstride.engine.snapshots.catalog import Position, SnapshotCatalog
from midstride.engine.snapshots.lease import acquire
from midstride.engine.snapshots.reader import read
from midstride.engine.snapshots.writer import Writer
from midstride.engine.state import codec
from midstride.engine.state.differences import differences
from midstride.engine.state.object_nodes import Instance, Same, View
from midstride.engine.state.row_shards import RowShard
from midstride.engine.storage.store import Store
from midstride.engine.world import World

PAGE = Path(__file__).parents[3] / "docs" / "snapshot-format.md"


def test_each_form_of_an_instance_is_explained() -> None:
    rows = re.findall(r"^\| ((?:`[a-z ]+`(?:, )?)+) \|", PAGE.read_text().partition("| `form` |")[2], re.MULTILINE)
    assert {form for row in rows for form in re.findall(r"`([a-z ]+)`", row)} == {
        kind.form for kind in KINDS if kind.form
    }


def _blocks(data: bytes) -> bytes:
    return b"".join(xxhash.xxh3_128_digest(data[at : at + 65536]) for at in range(0, len(data), 65536))


class Page:
    """A reader made from the page."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        manifest = json.loads((folder / "manifest.json").read_text())
        checksum = manifest.pop("checksum")
        plain = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
        assert xxhash.xxh3_128_hexdigest(plain.encode()) == checksum
        for name, facts in manifest["files"].items():
            data = (folder / name).read_bytes()
            assert (len(data), xxhash.xxh3_128_hexdigest(_blocks(data))) == (facts["bytes"], facts["xxh3_128"])
        own = f"rank-{rank:05d}-of-{manifest['world_size']:05d}"
        part = json.loads((folder / f"{own}.json").read_text())
        assert (manifest["format"], part["format"]) == (3, 3)
        assert base64.b64decode(part["blocks"]) == _blocks((folder / f"{own}.safetensors").read_bytes())
        self.tensors = load_file(folder / f"{own}.safetensors")
        for stem, names in part["elsewhere"].items():
            other = load_file(folder / f"{stem}.safetensors")
            self.tensors |= {name: other[name] for name in names}
        self.kinds: set[str] = set()
        self.top, self.read = part["tree"], dict[int, Any]()
        self.tree = self.value(part["tree"])

    def value(self, node: Any) -> Any:
        if not isinstance(node, (list, dict)):
            return node
        value = self.read[id(node)] = self.container(node)
        return value

    def container(self, node: Any) -> Any:
        if isinstance(node, list):
            return [self.value(item) for item in node]
        if "$" not in node:
            return {key: self.value(item) for key, item in node.items()}
        self.kinds.add(node["$"])
        return getattr(self, f"read_{node['$']}", self.simple)(node)

    def simple(self, node: dict[str, Any]) -> Any:
        kind = node["$"]
        if "items" in node and kind != "deque":
            items = [self.value(item) for item in node["items"]]
            return (
                complex(*items)
                if kind == "complex"
                else {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](items)
            )
        pairs = [(self.value(key), self.value(value)) for key, value in node.get("pairs", [])]
        return {
            "deque": lambda: deque((self.value(item) for item in node["items"]), node["maxlen"]),
            "dict": lambda: dict(pairs),
            "OrderedDict": lambda: OrderedDict(pairs),
            "Counter": lambda: Counter(dict(pairs)),
            "defaultdict": lambda: defaultdict(node["factory"] and getattr(builtins, node["factory"]), pairs),
            "bytes": lambda: base64.b64decode(node["value"]),
            "bytearray": lambda: bytearray(base64.b64decode(node["value"])),
            "Size": lambda: torch.Size(node["value"]),
            "dtype": lambda: getattr(torch, node["value"]),
            "device": lambda: torch.device(node["value"]),
        }[kind]()

    def read_float(self, node: dict[str, Any]) -> float:
        text = node["value"]
        return float(text) if "inf" in text else float(np.frombuffer(bytes.fromhex(text), ">f8")[0])

    def read_tensor(self, node: dict[str, Any]) -> torch.Tensor:
        entry, dtype, shape = self.tensors[node["name"]], getattr(torch, node["dtype"]), node["shape"]
        if "offset" in node:
            tensor = entry.view(dtype).as_strided(shape, node["strides"], node["offset"])
        else:
            tensor = entry if entry.dtype == dtype else entry.view(dtype).view(shape)
        if "strides" in node and "offset" not in node:
            tensor = torch.empty_strided(shape, node["strides"], dtype=dtype).copy_(tensor)
        if node.get("parameter"):
            return torch.nn.Parameter(tensor, requires_grad=node.get("requires_grad", False))
        return tensor.requires_grad_() if node.get("requires_grad") else tensor

    def read_sparse(self, node: dict[str, Any]) -> torch.Tensor:
        parts = self.value(node["indices"]), self.value(node["values"])
        return torch.sparse_coo_tensor(*parts, node["shape"], is_coalesced=node["coalesced"], check_invariants=True)

    def read_array(self, node: dict[str, Any]) -> np.ndarray[Any, Any]:
        dtype = np.lib.format.descr_to_dtype(self.value(node["dtype"]))
        shape = node["shape"][::-1] if node["order"] == "F" else node["shape"]
        plain = np.frombuffer(self.value(node["data"]).numpy().tobytes(), dtype).reshape(shape)
        return plain.T if node["order"] == "F" else plain

    def read_again(self, node: dict[str, Any]) -> Any:
        place = self.top
        for key in node["at"]:
            place = place[key]
        return self.read[id(place)]

    def read_same(self, node: dict[str, Any]) -> Same:
        return Same(node["as"])

    def read_view(self, node: dict[str, Any]) -> View:
        return View(node["of"], tuple(node["shape"]), tuple(node["strides"]), node["offset"])

    def read_instance(self, node: dict[str, Any]) -> Instance:
        return Instance(node["form"], node["kind"], self.value(node["state"]))

    def read_piece(self, node: dict[str, Any]) -> RowShard:
        return RowShard(self.value(node["rows"]), node["start"], tuple(node["shape"]))

    def read_scalar(self, node: dict[str, Any]) -> Any:
        dtype = np.lib.format.descr_to_dtype(self.value(node["dtype"]))
        return np.frombuffer(bytes.fromhex(node["bytes"]), dtype)[0]


WEIGHT = torch.arange(12.0).reshape(3, 4)
ROW = {"sum": 1.0}
#: something of every kind there is
EVERYTHING: dict[str, Any] = {
    "progress": {"step": 3},
    "plain": [1, 2.5, "text", None, True, {"key": 1}],
    "floats": [math.inf, -math.inf, math.nan, -0.0],
    "complex": 1 + 2j,
    "bytes": [b"\x00\xff", bytearray(b"12")],
    "sets": [(1, (2,)), {3}, frozenset({4})],
    "deque": deque([1, 2], maxlen=4),
    "rows": [{"sum": 0.0}, ROW],
    "open row": ROW,
    "keys": {1: "one", (2, 3): "pair", "$": "dollar"},
    "dicts": [OrderedDict(a=1), Counter("aab"), defaultdict(int, x=1), defaultdict(None, y=2)],
    "torch": [torch.Size([2, 3]), torch.bfloat16, torch.device("cpu")],
    "tensors": {
        "weight": WEIGHT,
        "tied": WEIGHT,
        "row": WEIGHT[1],
        "turned": torch.randn(4, 5).t(),
        "wide": torch.tensor([1 + 2j], dtype=torch.complex128),
        "small": torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn),
        "half": torch.tensor(1.0, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 3),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "leaf": torch.ones(2, requires_grad=True),
    },
    "piece": RowShard(torch.ones(2, 3), 4, (6, 3)),
    "sparse": torch.eye(3).to_sparse(),
    "objects": [Same("module/a"), View("tensor w", (2,), (1,), 3), Instance("object", "m:A", {"attributes": {"x": 1}})],
    "arrays": [np.arange(6).reshape(2, 3), np.asfortranarray(np.ones((2, 3))), np.array(["2026-01-01"], "M8[D]")],
    "scalars": [np.float32(1.5), np.datetime64("2026-01-01")],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store = Store.open(tmp_path)
    writer = Writer(store, acquire(store, None, {}), World(), lambda value: [value], "digits", 1)
    snapshot = writer.take(Position(3), EVERYTHING, "", {}).future.result(LIMIT_S)
    assert writer.close(100)
    assert differences(EVERYTHING, read(store, snapshot, 0)) == []
    assert SnapshotCatalog(store).newest_good() == snapshot
    return tmp_path / "snapshots" / snapshot.name


def test_a_snapshot_is_read_by_the_words_of_the_page(folder: Path) -> None:
    page = Page(folder)
    assert differences(EVERYTHING, page.tree) == []
    assert page.kinds == set(codec._READERS)  # the page knows every kind there is
    assert page.tree["open row"] is page.tree["rows"][1]
    tensors = page.tree["tensors"]
    assert tensors["turned"].stride() == EVERYTHING["tensors"]["turned"].stride()
    assert tensors["weight"].data_ptr() + 16 == tensors["row"].data_ptr()


def test_the_page_names_every_kind_and_every_file(folder: Path) -> None:
    text = PAGE.read_text()
    for word in (*codec._READERS, *(key for key in json.loads((folder / "manifest.json").read_text()))):
        assert f"`{word}`" in text, word


def test_the_header_is_padded_and_the_widest_come_first(folder: Path) -> None:
    data = next(folder.glob("*.safetensors")).read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert (8 + length) % 64 == 0
    entries = sorted(json.loads(data[8 : 8 + length]).values(), key=lambda entry: entry["data_offsets"])
    ends = [0, *(entry["data_offsets"][1] for entry in entries)]
    assert [entry["data_offsets"][0] for entry in entries] == ends[:-1]
    assert len(data) == 8 + length + ends[-1]
