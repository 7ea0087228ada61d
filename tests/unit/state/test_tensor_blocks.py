"""A copier that has copied a state before copies a changed one as a new copier does."""

import copy
import random
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from midstride.engine.errors import UnsupportedState
from midstride.engine.snapshots.buffer_pool import Buffer
from midstride.engine.snapshots.state_copy import StateCopier, StateCopy
from midstride.engine.state.codec import encode_lazily
from midstride.engine.state.shared_containers import json_of
from midstride.engine.state.tensor_blocks import TensorBlocks
from midstride.engine.world import World

pytestmark = pytest.mark.fast

Tree = dict[str, Any]


def _tree() -> Tree:
    """Return a state as a module and Adam have it: weights, and a dict for each parameter."""
    weights = {f"layer.{n}": torch.arange(6.0).reshape(2, 3) + n for n in range(3)}
    state = {n: {"step": torch.tensor(1.0), "exp_avg": torch.full((2, 3), n), "sq": torch.ones(4)} for n in range(3)}
    return {
        "module": OrderedDict(weights),
        "optimizer": {"state": state, "lr": 0.1},
        "buffers": {"mean": torch.ones(2)},
        "averages": {"mean": torch.zeros(2)},
    }


def _set(*path: Any) -> Callable[[Any], Callable[[Tree], None]]:
    """Return a function that takes a value, and returns a change that sets it at `path`."""

    def to(value: Any) -> Callable[[Tree], None]:
        def change(tree: Tree) -> None:
            for key in path[:-1]:
                tree = tree[key]
            tree[path[-1]] = value(tree[path[-1]]) if callable(value) else value

        return change

    return to


def _each(*changes: Callable[[Tree], object]) -> Callable[[Tree], None]:
    def change(tree: Tree) -> None:
        for one in changes:
            one(tree)

    return change


weight, moment = _set("module", "layer.1"), _set("optimizer", "state", 1, "exp_avg")
CHANGES: dict[str, Callable[[Tree], object]] = {
    "nothing": lambda tree: None,
    "values": lambda tree: [tensor.add_(7) for tensor in tree["module"].values()],
    "a plain value": _set("optimizer", "lr")(0.2),
    "a new tensor": weight(lambda old: old + 1),
    "a new optimizer state": moment(lambda old: old * 2),
    "set_": lambda tree: tree["module"]["layer.1"].set_(torch.full((2, 3), 9.0)),
    "resize_ within the memory": lambda tree: tree["module"]["layer.1"].resize_(2, 2),
    "resize_ beyond it": lambda tree: tree["module"]["layer.1"].resize_(40).fill_(3),
    "data": lambda tree: setattr(tree["module"]["layer.1"], "data", torch.zeros(2, 3)),
    "data of other strides": lambda tree: setattr(
        tree["module"]["layer.1"], "data", tree["module"]["layer.1"].data.t()
    ),
    "strides in place": lambda tree: tree["module"]["layer.1"].t_(),
    "a dimension in place": lambda tree: tree["optimizer"]["state"][1]["exp_avg"].unsqueeze_(0),
    "dtype": moment(lambda old: old.double()),
    "bits of another dtype": moment(lambda old: old.view(torch.int32) if old.is_floating_point() else old.float()),
    "requires_grad": lambda tree: tree["module"]["layer.1"].requires_grad_(),
    "a parameter": weight(lambda old: nn.Parameter(old)),
    "shared tensor": lambda tree: tree["module"].update({"layer.1": tree["module"]["layer.0"]}),
    "shared memory": lambda tree: tree["module"].update({"layer.1": tree["module"]["layer.0"][:, 1:]}),
    "shared between parts": lambda tree: tree["buffers"].update(mean=tree["module"]["layer.0"][0]),
    "the same dict twice": lambda tree: tree["optimizer"]["state"].update({2: tree["optimizer"]["state"][1]}),
    "dict in another place": lambda tree: tree.update(again=tree["optimizer"]["state"][1]),
    "a key less": lambda tree: tree["module"].pop("layer.2"),
    "a key more": lambda tree: tree["optimizer"]["state"][1].update(max=torch.ones(2)),
    "another order": lambda tree: tree["module"].move_to_end("layer.0"),
    "parts in another order": lambda tree: tree.update(buffers=tree.pop("buffers")),
    "parts in each other's place": lambda tree: tree.update(buffers=tree["averages"], averages=tree["buffers"]),
    "a tensor before the other parts": lambda tree: tree.update(
        {"first": torch.ones(3), **{key: tree.pop(key) for key in [*tree]}}
    ),
    "another type of key": lambda tree: tree["optimizer"].update(
        state={bool(n) if n < 2 else n: one for n, one in tree["optimizer"]["state"].items()}
    ),
    "another type of dict": lambda tree: tree.update(module=dict(tree["module"])),
    "a state emptied": lambda tree: tree["optimizer"]["state"][1].clear(),
    "a plain value among tensors": _set("optimizer", "state", 1, "step")(1),
    "None": weight(None),
    "sparse": weight(lambda old: torch.eye(2).to_sparse()),
    "expanded": weight(lambda old: torch.ones(1, 3).expand(2, 3)),
    "conjugate": weight(lambda old: torch.ones(2, dtype=torch.complex64).mul(1j).conj()),
    "an array": weight(lambda old: old.numpy()),
    "two changes": _each(weight(lambda old: old.t()), moment(lambda old: old + 1)),
}


def _copied(copier: StateCopier, tree: Tree) -> tuple[StateCopy, bytes]:
    copied = copier.copy(tree, Buffer())
    return copied, bytes(copied.data)


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_between_two_snapshots_is_copied(name: str) -> None:
    copier, tree = StateCopier(World(), lambda path: False), _tree()
    first, _ = _copied(copier, tree)
    _copied(copier, tree)
    before = json_of(copy.deepcopy(first.document))
    CHANGES[name](tree)
    for _ in range(2):
        found, right = _copied(copier, tree), _copied(StateCopier(World(), lambda path: False), tree)
        assert json_of(found[0].document) == json_of(right[0].document)
        assert found[1] == right[1]
        assert json_of(first.document) == before  # a thread may be writing it


@pytest.mark.parametrize("seed", range(8))
def test_changes_one_after_another_are_copied(seed: int) -> None:
    copier, tree, changes = StateCopier(World(), lambda path: False), _tree(), [*CHANGES.values()]
    random.Random(seed).shuffle(changes)
    copied = 0
    for change in changes:
        with suppress(LookupError, AttributeError, RuntimeError, ValueError, TypeError):  # what it changes is gone
            change(tree)
        with suppress(UnsupportedState):
            right = _copied(StateCopier(World(), lambda path: False), tree)
            found = _copied(copier, tree)
            assert (json_of(found[0].document), found[1]) == (json_of(right[0].document), right[1])
            copied += 1
    assert copied > len(changes) / 2


@pytest.mark.parametrize(
    "make",
    [
        lambda old: old.clone().requires_grad_() * 2,
        lambda old: torch.empty(2, device="meta"),
        lambda old: old.untyped_storage().resize_(0) and old,
        lambda old: {1: object()},
    ],
)
def test_what_cannot_be_written_is_found_in_a_known_dict(make: Callable[[Tensor], Any]) -> None:
    blocks, tree = TensorBlocks(), _tree()
    encode_lazily(tree, blocks)
    kept, tree["module"]["layer.1"] = tree["module"]["layer.1"], make(tree["module"]["layer.1"])
    with pytest.raises(UnsupportedState, match=r"module/layer\.1"):
        encode_lazily(tree, blocks)
    tree["module"]["layer.1"] = torch.ones_like(kept)
    assert len(encode_lazily(tree, blocks)[1].tensors) == len(encode_lazily(tree)[1].tensors)


def test_unchanged_dicts_are_encoded_once() -> None:
    blocks, tree = TensorBlocks(), _tree()
    first, second = encode_lazily(tree, blocks)[0], encode_lazily(tree, blocks)[0]
    assert second["module"].content is first["module"]
    assert second["optimizer"]["state"].content is first["optimizer"]["state"]
