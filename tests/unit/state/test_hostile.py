"""Files from a hostile folder: read as data, or refused as damage."""

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.child_process import in_child
from support.hostile_files import RANK, STATE, Parts

from midstride.engine.errors import SnapshotDamaged, SnapshotError
from midstride.engine.snapshots.catalog import SnapshotCatalog
from midstride.engine.snapshots.lease import acquire
from midstride.engine.snapshots.position import Position
from midstride.engine.snapshots.reader import read
from midstride.engine.snapshots.writer import Writer
from midstride.engine.state.codec import encode_lazily
from midstride.engine.storage.store import Store
from midstride.engine.world import World


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store = Store.open(tmp_path / "run")
    writer = Writer(store, acquire(store, None, {}), World(), lambda value: [value], "digits", 1)
    snapshot = writer.take(Position(3), STATE, "", {}).future.result(30)
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


#: what is done on purpose -> part of the words
ATTACKS: dict[str, tuple[Callable[[Parts], object], str]] = {
    "an instance without a state": (
        lambda parts: parts.part["tree"].update(x={"$": "instance", "form": "weak", "kind": "m:A", "state": "eval"}),
        "an instance has a form, a kind and a state",
    ),
    "a scalar that is a pointer": (
        lambda parts: parts.part["tree"].update(x={"$": "scalar", "dtype": "|O", "bytes": "41" * 8}),
        "no dtype of plain values",
    ),
    "a container that stands where none is": (
        lambda parts: parts.part["tree"].update(x={"$": "again", "at": ["nowhere"]}),
        "KeyError",
    ),
    "a container that stands in itself": (
        lambda parts: parts.part["tree"].update(x=[{"$": "again", "at": ["x"]}]),
        "KeyError",
    ),
    "an array of pointers": (lambda parts: parts.part["tree"]["arrays"][0].update(dtype="|O"), "no dtype of plain"),
    "pointers in a field": (
        lambda parts: parts.part["tree"]["arrays"][0].update(dtype=[["a", "|O"]]),
        "no dtype of plain values",
    ),
    "a dtype by another name": (lambda parts: parts.entries["weight"].update(dtype="load"), "no dtype 'load'"),
    "a quantised dtype": (lambda parts: parts.entries["turned"].update(dtype="qint8"), "no dtype 'qint8'"),
    "an attribute of torch": (
        lambda parts: parts.part["tree"].update(x={"$": "dtype", "value": "classes"}),
        "no dtype 'classes'",
    ),
    "strides beyond the file": (lambda parts: parts.entries["row"].update(strides=[1000]), "a view of element"),
    "an offset before it": (lambda parts: parts.entries["row"].update(offset=-4), "no shape or strides"),
    "an offset beyond it": (lambda parts: parts.entries["row"].update(offset=10**18), "a view of element"),
    "a shape beyond it": (lambda parts: parts.entries["row"].update(shape=[10**15]), "a view of element"),
    "a view that seems endless": (
        lambda parts: parts.entries["row"].update(shape=[10**15], strides=[0]),
        "a view of 1000000000000000 elements",
    ),
    "a tensor blown up by strides": (
        lambda parts: parts.entries["turned"].update(shape=[10**12], strides=[0]),
        "invalid for input of size",
    ),
    "strides that overlap": (lambda parts: parts.entries["turned"].update(strides=[1, 1]), "strides (1, 1)"),
    "more dimensions than any": (lambda parts: parts.entries["turned"].update(shape=[1] * 99), "no shape or strides"),
    "a size that is no number": (lambda parts: parts.entries["turned"].update(shape=[True]), "no shape or strides"),
    "an array larger than its bytes": (
        lambda parts: parts.part["tree"]["arrays"][0].update(shape=[10**12]),
        "48 bytes for an array",
    ),
    "a scalar larger than its bytes": (
        lambda parts: parts.part["tree"]["arrays"][2].update(dtype="<f8"),
        "4 bytes for a scalar",
    ),
    "truth that is neither": (
        lambda parts: setattr(parts, "body", bytes([7]) * len(parts.body)),
        "truth values holds others",
    ),
    "a header longer than the file": (lambda parts: setattr(parts, "length", 2**60), "a header of"),
    "tensors larger than the file": (_told_larger, "for tensor module/turned"),
    "a tensor that is not there": (lambda parts: parts.entries["row"].update(name="another"), "KeyError: 'another'"),
    "a kind that is not there": (lambda parts: parts.entries["row"].update({"$": "pickle"}), "KeyError: 'pickle'"),
    "nested without end": (_nested, "nested deeper"),
    "another's folder": (
        lambda parts: parts.part["elsewhere"].update({"../../secret": ["x"]}),
        "KeyError: '../../secret.safetensors'",
    ),
    "files above the folder": (
        lambda parts: parts.manifest["files"].update({"../../x": {"bytes": 1, "xxh3_128": ""}}),
        "names a file '../../x': it is not in its folder",
    ),
    "files from the root": (
        lambda parts: parts.manifest["files"].update({"/etc/passwd": {"bytes": 1, "xxh3_128": ""}}),
        "names a file '/etc/passwd'",
    ),
    "a world without a size": (
        lambda parts: parts.manifest.update(world_size="2"),
        "world_size is '2', and has to be an integer",
    ),
    "files that are none": (lambda parts: parts.manifest.update(files=[1]), "files is [1], and has to be an object"),
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


def test_snapshots_may_be_kept_on_another_disk(folder: Path) -> None:
    folder.parent.rename(folder.parents[1] / "disk")
    folder.parent.symlink_to(folder.parents[1] / "disk")
    assert [*load(folder)] == [*STATE]


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
