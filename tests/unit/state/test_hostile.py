"""Files from a hostile folder: read as data, or refused as damage."""

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.child_process import in_child
from support.hostile_files import RANK, STATE, Parts
from support.limit import LIMIT_S

from midstride.engine.errors import SnapshotDamaged, SnapshotError
from midstride.engine.snapshots.catalog import SnapshotCatalog
from midstride.engine.snapshots.lease import acquire
from midstride.engine.snapshots.position import Position
from midstride.engine.snapshots.reader import read
from midstride.engine.snapshots.writer import Writer
from midstride.engine.state.codec import encode_lazily
from midstride.engine.storage.store import Store
from midstride.engine.world import World

Attack = Callable[[Parts], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store = Store.open(tmp_path / "run")
    writer = Writer(store, acquire(store, None, {}), World(), lambda value: [value], "digits", 1)
    snapshot = writer.take(Position(3), STATE, "", {}).future.result(LIMIT_S)
    assert writer.close(10.0)
    return tmp_path / "run" / "snapshots" / snapshot.name


def load(folder: Path) -> Any:
    """Read the snapshot in `folder`, from its manifest on."""
    store = Store.open(folder.parents[1])
    snapshot = SnapshotCatalog(store).get(folder.name)
    assert snapshot is not None
    return read(store, snapshot, 0)


def _nested(parts: Parts) -> None:
    parts.tree = "[" * 100_000 + "]" * 100_000


def _told_larger(parts: Parts) -> None:
    parts.header["module/turned"] |= {"shape": [10**15], "data_offsets": [0, 4 * 10**15]}


def _in_tree(value: Any) -> Attack:
    return lambda parts: parts.part["tree"].update(x=value)


def _of_array(number: int, **changes: Any) -> Attack:
    return lambda parts: parts.part["tree"]["arrays"][number].update(changes)


def _of_tensor(tensor: str, **changes: Any) -> Attack:
    return lambda parts: parts.entries[tensor].update(changes)


def _with_file(name: str) -> Attack:
    return lambda parts: parts.manifest["files"].update({name: {"bytes": 1, "xxh3_128": ""}})


WITHOUT_STATE = {"$": "instance", "form": "weak", "kind": "m:A", "state": "eval"}
#: what is done on purpose -> part of the words
ATTACKS: dict[str, tuple[Attack, str]] = {
    "an instance without a state": (_in_tree(WITHOUT_STATE), "an instance has a form, a kind and a state"),
    "a pointer for a scalar": (_in_tree({"$": "scalar", "dtype": "|O", "bytes": "41" * 8}), "no dtype of plain values"),
    "a container that stands where none is": (_in_tree({"$": "again", "at": ["nowhere"]}), "KeyError"),
    "a container that stands in itself": (_in_tree([{"$": "again", "at": ["x"]}]), "KeyError"),
    "an array of pointers": (_of_array(0, dtype="|O"), "no dtype of plain"),
    "pointers in a field": (_of_array(0, dtype=[["a", "|O"]]), "no dtype of plain values"),
    "a dtype by another name": (_of_tensor("weight", dtype="load"), "no dtype 'load'"),
    "a quantised dtype": (_of_tensor("turned", dtype="qint8"), "no dtype 'qint8'"),
    "an attribute of torch": (_in_tree({"$": "dtype", "value": "classes"}), "no dtype 'classes'"),
    "strides beyond the file": (_of_tensor("row", strides=[1000]), "a view of element"),
    "an offset before it": (_of_tensor("row", offset=-4), "no shape or strides"),
    "an offset beyond it": (_of_tensor("row", offset=10**18), "a view of element"),
    "a shape beyond it": (_of_tensor("row", shape=[10**15]), "a view of element"),
    "a view without an end": (
        _of_tensor("row", shape=[10**15], strides=[0]),
        "a view of 1000000000000000 elements",
    ),
    "a tensor blown up": (_of_tensor("turned", shape=[10**12], strides=[0]), "invalid for input of size"),
    "strides that overlap": (_of_tensor("turned", strides=[1, 1]), "strides (1, 1)"),
    "more dimensions than any": (_of_tensor("turned", shape=[1] * 99), "no shape or strides"),
    "a size that is no number": (_of_tensor("turned", shape=[True]), "no shape or strides"),
    "an array larger than its bytes": (_of_array(0, shape=[10**12]), "48 bytes for an array"),
    "a scalar larger than its bytes": (_of_array(2, dtype="<f8"), "4 bytes for a scalar"),
    "truth that is neither": (
        lambda parts: setattr(parts, "body", bytes([7]) * len(parts.body)),
        "booleans holds bytes other than 0 and 1",
    ),
    "a header longer than the file": (lambda parts: setattr(parts, "length", 2**60), "a header of"),
    "tensors larger than the file": (_told_larger, "for tensor module/turned"),
    "a tensor that is not there": (_of_tensor("row", name="another"), "KeyError: 'another'"),
    "a kind that is not there": (_of_tensor("row", **{"$": "pickle"}), "KeyError: 'pickle'"),
    "nested without end": (_nested, "nested deeper"),
    "another's folder": (
        lambda parts: parts.part["elsewhere"].update({"../../secret": ["x"]}),
        "KeyError: '../../secret.safetensors'",
    ),
    "files above the folder": (_with_file("../../x"), "names the file '../../x', which is outside its folder"),
    "files from the root": (_with_file("/etc/passwd"), "names the file '/etc/passwd'"),
    "a world without a size": (
        lambda parts: parts.manifest.update(world_size="2"),
        "world_size is '2' instead of an i",
    ),
    "files that are none": (lambda parts: parts.manifest.update(files=[1]), "files is [1] instead of an object"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_was_changed_on_purpose_is_damage(folder: Path, attack: str) -> None:
    change, words = ATTACKS[attack]
    parts = Parts(folder)
    change(parts)
    parts.write()

    def refused() -> None:
        with pytest.raises(SnapshotDamaged) as caught:
            load(folder)
        assert words in str(caught.value), caught.value

    code, grown = in_child(refused)
    assert code == 0
    assert grown < 2**27


def _linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def _looped(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def _a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _folder_linked(path: Path) -> None:
    elsewhere = path.parent.rename(path.parents[2] / "elsewhere")
    path.parent.symlink_to(elsewhere)


@pytest.mark.parametrize("name", ["manifest.json", f"{RANK}.json", f"{RANK}.safetensors"])
@pytest.mark.parametrize("change", [_linked, _looped, _fifo, _device, _a_folder, _folder_linked])
def test_only_files_are_read_and_no_link_is_followed(folder: Path, name: str, change: Callable[[Path], None]) -> None:
    change(folder / name)
    with pytest.raises(SnapshotDamaged, match=r"cannot be read|is missing|has \d+ bytes"):
        load(folder)


@pytest.mark.parametrize("path", ["../x", "a/../../x", "/etc/hostname"])
@pytest.mark.parametrize("verb", ["read", "size", "remove", "list", "find"])
def test_no_path_leads_out_of_a_store(tmp_path: Path, verb: str, path: str) -> None:
    (tmp_path / "x").write_text("kept")
    with pytest.raises(SnapshotDamaged, match="leads out of"):
        getattr(Store.open(tmp_path / "run"), verb)(path)
    assert (tmp_path / "x").read_text() == "kept"


_VALUES = [
    None,
    True,
    -1,
    0,
    1,
    2,
    7,
    2**31,
    2**63,
    10**30,
    1.5,
    "",
    "|O",
    "float64",
    "../x",
    "U8",
    [],
    [0],
    [2, 2],
    {},
]


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every container in a document with each of its keys."""
    for key in [*(node if isinstance(node, dict) else range(len(node)))]:
        yield node, key
        if isinstance(node[key], (dict, list)):
            yield from _places(node[key])


def _mutate(parts: Parts, draw: random.Random) -> None:
    documents = [parts.part, parts.part["tree"], parts.header, parts.manifest]
    for _ in range(draw.randint(1, 3)):
        node, key = draw.choice([*_places(draw.choice(documents))])
        if isinstance(node, list) and key >= len(node):
            continue
        kept = [item[name] for item, name in _places(documents[1]) if not isinstance(item[name], (dict, list))]
        node[key] = draw.choice([*_VALUES, draw.choice(kept)])
    if draw.random() < 0.1:
        parts.length = draw.choice([0, 1, 2**20, 2**62])
    if draw.random() < 0.2:
        at = draw.randrange(len(parts.body))
        parts.body = draw.choice(
            [parts.body[:at], parts.body + b"more", parts.body[:at] + b"\xff" + parts.body[at + 1 :]]
        )


@pytest.mark.parametrize("seed", range(4))
def test_randomly_changed_files_are_read_or_named_as_damaged(folder: Path, seed: int) -> None:
    draw = random.Random(seed)
    whole = {path: path.read_bytes() for path in folder.iterdir()}
    counts = {"read": 0, "damaged": 0}

    def fuzz() -> None:
        for _ in range(150):
            for path, data in whole.items():
                path.write_bytes(data)
            parts = Parts(folder)
            _mutate(parts, draw)
            parts.write()
            try:
                _used(load(folder))
                counts["read"] += 1
            except SnapshotError:
                counts["damaged"] += 1
        assert counts["damaged"] > 50, counts

    code, grown = in_child(fuzz)
    assert code == 0
    assert grown < 2**28


def _used(tree: Any) -> None:
    """Read every byte of what came back."""
    _, leaves = encode_lazily(tree)
    for tensor in leaves.tensors:
        tensor.clone()
    repr(tree)
