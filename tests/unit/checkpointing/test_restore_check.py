"""A part that does not take back what it gave is named, however large it is."""

import gc
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.nets import Net
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from midstride.engine import Callback, Trainer
from midstride.engine.checkpointing.restore_check import (
    CHECKED_PARTS,
    check_restores,
    copied_with_digests,
    differs,
    with_places,
)
from midstride.engine.errors import NotExact, ReadBackDiffers
from midstride.engine.state.differences import differences
from midstride.engine.state.row_shards import RowShard
from midstride.engine.state.stateful import restore_parts
from midstride.engine.testing import final_state

LARGE = 1 << 20
TENSORS: dict[str, Callable[[], Tensor]] = {
    "small": lambda: torch.ones(3),
    "large": lambda: torch.ones(LARGE),
    "large, 16 bits": lambda: torch.ones(LARGE, dtype=torch.bfloat16),
    "large, turned": lambda: torch.ones(1024, LARGE // 512).t(),
    "large, every other": lambda: torch.ones(2 * LARGE)[::2],
}


class Part:
    """Gives its state, and takes a state by `take`."""

    def __init__(self, state: dict[str, Any], take: Callable[[Tensor], Tensor] = lambda given: given) -> None:
        self.state, self.take = state, take

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self.state = {name: self.take(value) for name, value in state_dict.items()}


def parts_with(part: Part) -> dict[str, Any]:
    return {name: Part({}) for name in ("generators", *CHECKED_PARTS)} | {"module": part}


def with_another_end(given: Tensor) -> Tensor:
    changed = given.clone()
    changed[-1] *= 2
    return changed


@pytest.mark.parametrize("kind", TENSORS)
def test_a_tensor_that_comes_back_otherwise_is_named(kind: str) -> None:
    check_restores(parts_with(Part({"weights": TENSORS[kind]()})), "before the first step")
    # In another memory, and in another order of it, the values are the same.
    check_restores(parts_with(Part({"weights": TENSORS[kind]()}, lambda given: given.clone().contiguous())), "before")
    with pytest.raises(NotExact, match=r"the module, before the first step, did not load .*weights"):
        check_restores(parts_with(Part({"weights": TENSORS[kind]()}, with_another_end)), "before the first step")


def test_the_collector_is_paused_while_states_are_compared() -> None:
    def taken(given: Tensor) -> Tensor:
        is_on.append(gc.isenabled())
        return given

    is_on: list[bool] = []
    check_restores(parts_with(Part({"weights": torch.ones(3)}, taken)), "before the first step")
    assert is_on == [False]
    assert gc.isenabled()


class Told(Net):
    """Takes from a snapshot what training never sets."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded = list[int]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step([batch], batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = self.global_step

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = [checkpoint["mine"]]


def test_what_on_load_checkpoint_sets_stays_and_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for steps, loaded in ((2, []), (3, [2])):
        trainer = Trainer(max_steps=steps, snapshots={"every_steps": 1}, enable_progress_bar=False)
        trainer.fit(module := Told(), DataLoader(torch.ones(8, 1)), run=str(tmp_path / "run"))  # type: ignore[arg-type]
        assert module.loaded == loaded
    (message,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert message.startswith("on_load_checkpoint sets module.loaded (0 items, now 1 items) to other values than")


def test_unrestored_attributes_are_named_before_users_set_theirs() -> None:
    user = Part({})
    parts = {"objects": Part({"a": torch.ones(1)}, lambda given: given * 2), "user": user}
    with pytest.raises(ReadBackDiffers, match="objects did not restore the state it returned: a "):
        restore_parts(parts, {"objects": {"a": torch.ones(1)}, "user": {"said": torch.ones(1)}})
    assert user.state == {}


class Appends(Told):
    """Gives its schedule a function that no snapshot can hold, as for a parameter group that it adds."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [LambdaLR(optimizer, lambda epoch: 1.0)]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trainer.schedulers[0].scheduler.lr_lambdas.append(lambda epoch: 0.5)


def test_a_part_that_lacks_a_lost_value_after_a_restore_is_named(tmp_path: Path) -> None:
    def fit(steps: int) -> None:
        trainer = Trainer(max_steps=steps, snapshots={"every_steps": 1}, enable_progress_bar=False)
        trainer.fit(Appends(), DataLoader(torch.ones(8, 1)), run=str(tmp_path / "run"))  # type: ignore[arg-type]

    fit(2)
    with pytest.raises(ReadBackDiffers, match=r"schedulers did not restore .*lr_lambdas.* or on_load_checkpoint"):
        fit(3)


class Lends(Told):
    """Saves the optimizer's own state of a weight and a count, and empties what it loads."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen += 1
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def get_extra_state(self) -> Any:
        trainer: Any = getattr(self, "trainer", None)
        state = trainer.optimizers[0].state if getattr(trainer, "optimizers", None) else {}
        return {"of the optimizer": state.get(next(self.parameters()), {}), "seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        state["of the optimizer"].clear()
        self.seen = state.pop("seen")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"a": [1]}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint.pop("mine")["a"].clear()


class Pops(Callback):
    """Empties what it loads."""

    def __init__(self) -> None:
        self.seen = 0

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.seen += 1

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "of": {"a": 1}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict.pop("seen")
        state_dict["of"].clear()


def test_user_code_can_empty_the_state_that_it_loads(tmp_path: Path) -> None:
    def fit(run: Path, steps: int) -> None:
        options: dict[str, Any] = {"snapshots": {"every_steps": 1}, "enable_progress_bar": False}
        trainer = Trainer(max_steps=steps, seed=1, callbacks=[Pops()], **options)
        trainer.fit(Lends(), DataLoader(torch.ones(8, 1)), run=str(run))  # type: ignore[arg-type]

    fit(tmp_path / "whole", 4)
    for steps in (2, 4):
        fit(tmp_path / "run", steps)
    assert differences(final_state(str(tmp_path / "whole")), final_state(str(tmp_path / "run"))) == []


class Broken(Part):
    """Has no state once one was loaded."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self.state = None  # type: ignore[assignment]

    def state_dict(self) -> dict[str, Any]:
        return dict(**self.state)


def test_a_part_without_state_after_a_restore_is_named() -> None:
    with pytest.raises(ReadBackDiffers, match=r"schedulers has no state after the snapshot .* or on_load_checkpoint"):
        restore_parts({"schedulers": Broken({"a": 1})}, {"schedulers": {"a": 1}})


class Lonely(Part):
    """Another rank ends while its state is restored."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        raise RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer")


def test_a_rank_lost_in_a_restore_is_no_fault_of_the_run() -> None:
    with pytest.raises(RuntimeError, match="closed by peer"):
        restore_parts({"strategy": Lonely({"a": 1})}, {"strategy": {"a": 1}})


def test_large_tensors_are_compared_by_digest_or_place() -> None:
    large = torch.zeros(1 << 15)
    tree = {"weights": OrderedDict(large=large), "rows": RowShard(large, 0, (1 << 15,))}
    before, placed = copied_with_digests(tree), with_places(tree)
    assert not differs(before, tree)
    assert not differs(before, copied_with_digests(tree))
    large[3] = 1
    assert [path.partition(" ")[0] for path in differs(before, tree)] == ["weights/large", "rows/0"]
    assert not differs(placed, {**tree, "weights": OrderedDict(large=large.detach())})
    moved = {**tree, "weights": OrderedDict(large=large.clone())}
    assert differs(placed, moved) == ["weights/large (float32[32768], now float32[32768])"]


class Positions(Told):
    """Has a buffer made in inference mode, to which torch refuses to copy."""

    def __init__(self) -> None:
        super().__init__()
        with torch.inference_mode():
            self.register_buffer("positions", torch.ones(1) * 2)


def test_a_buffer_that_cannot_be_restored_is_named_before_the_first_step(tmp_path: Path) -> None:
    trainer = Trainer(max_steps=1, enable_progress_bar=False)
    with pytest.raises(NotExact, match=r"(?s)before the first step, .*Inplace update to inference tensor"):
        trainer.fit(Positions(), DataLoader(torch.ones(8, 1)), run=str(tmp_path / "run"))  # type: ignore[arg-type]
