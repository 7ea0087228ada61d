"""Sharded training as a user meets it: weights that come out whole, pieces that fit any world, what is refused."""

import json
import logging
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from laws.lives import SampleData, Tangled
from safetensors.torch import load_file
from support.limit import LIMIT_S
from support.snapshot_files import flip
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from midstride.engine import Callback, Trainer, TrainingModule
from midstride.engine.errors import EngineError, NotExact, SnapshotDamaged
from midstride.engine.fault_injection import RESUME_PHASES, FaultPlan
from midstride.engine.snapshots.catalog import Catalog, SnapshotCatalog
from midstride.engine.snapshots.committer import Committer
from midstride.engine.snapshots.inspection import inspect_run
from midstride.engine.snapshots.reader import load_weights, read
from midstride.engine.snapshots.weights import download_tensors, newest_weights
from midstride.engine.state.differences import differences
from midstride.engine.state.row_shards import RowShard, join_rows
from midstride.engine.storage.store import Store
from midstride.engine.strategies import sharded
from midstride.engine.testing import run_ranks
from midstride.engine.trees import is_state_leaf, map_leaves
from midstride.engine.world import World


def trainer_of(strategy: str, **options: Any) -> Trainer:
    given = {"max_epochs": 1, "snapshots": {"every_steps": 2, "keep": 100}, "enable_progress_bar": False, **options}
    return Trainer(strategy=strategy, seed=5, **given)


class Deep(Tangled):
    """With blocks in a list, two of which share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        self.blocks[1].weight = self.blocks[0].weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.middle(torch.relu(self.norm(self.first(x).view(-1, 20, 2)).flatten(1)))
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        return self.last(hidden)


def train_test_train(folder: str, strategy: str) -> None:
    trainer = trainer_of(strategy)
    module, data = Deep(), Data(2, 0)
    trainer.fit(module, data, run=f"{folder}/run")
    values = trainer.validate(module, data, ckpt_path="last")
    assert trainer_of(strategy).validate(Deep(), data, ckpt_path=f"{folder}/run/last") == values
    predictions = trainer.predict(module, data)
    trainer_of(strategy, max_epochs=2).fit(module, data, run=f"{folder}/run")
    found = {"values": values, "predictions": [len(one) for one in predictions]}
    Path(folder, f"{trainer.world.rank}.json").write_text(json.dumps(found))


class Features(Dataset[Tensor]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((6,), float(index))


class Data(SampleData):
    def predict_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Features(), batch_size=2)


def test_fit_then_test_then_fit_and_weights_that_are_whole(tmp_path: Path) -> None:
    assert run_ranks(train_test_train, str(tmp_path), "fully_sharded", processes=2) == [0, 0]
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert found[0]["values"] == found[1]["values"]
    assert [one["predictions"] for one in found] == [[2, 1], [2]]
    module = Deep.load_from_checkpoint(str(tmp_path / "run" / "last"))
    assert differences(dict(module.state_dict()), whole(tmp_path / "run", "module")) == []
    store = Store.open(tmp_path / "run")
    saved = newest_weights(store, "last")
    assert saved is not None
    parts = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    assert sorted(name for name in saved.manifest["files"] if name.endswith("safetensors")) == parts
    merged = load_file(download_tensors(store, saved, tmp_path / "merged.safetensors"))
    assert differences(dict(module.state_dict()), {**merged, "blocks.1.weight": merged["blocks.0.weight"]}) == []
    newest = SnapshotCatalog(store).snapshots()[-1]
    of_snapshot = Deep.load_from_checkpoint(str(tmp_path / "run" / newest.path))
    assert differences(dict(module.state_dict()), dict(of_snapshot.state_dict())) == []
    states = {finding.state for finding in inspect_run(Store.open(tmp_path / "run"), read=True)}
    assert states <= {"verified", "superseded"}


def whole(run: Path, part: str, name: str | None = None) -> Any:
    """Return a part of a snapshot with its pieces put together, and the rest as rank 0 has it."""
    store = Store.open(run)
    found = [one for one in SnapshotCatalog(store).snapshots() if name in (None, one.name)][-1]
    trees = [read(store, found, rank)[part] for rank in range(found.manifest["world_size"])]

    def joined(*leaves: Any) -> Any:
        return join_rows(leaves) if isinstance(leaves[0], RowShard) else leaves[0]

    return _plain(map_leaves(joined, *trees, is_leaf=is_state_leaf))


def averages(run: Path, name: str) -> dict[str, Tensor]:
    """Return the averages that a snapshot of `Adaptive` holds, put together."""
    store = Store.open(run)
    found = next(one for one in SnapshotCatalog(store).snapshots() if one.name == name)
    ranks = [read(store, found, rank)["objects"]["module"][""] for rank in range(found.manifest["world_size"])]
    names = ranks[0]["averages"]
    return {name: join_rows([rank["averages"][name].state["rows"] for rank in ranks]) for name in names}


def _plain(tree: Any) -> Any:
    return {key: _plain(value) for key, value in tree.items()} if isinstance(tree, dict) else tree


class Witness(Callback):
    """Gathers what a life begins with."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.process = 0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if self.process == os.getpid():
            return
        self.process = os.getpid()
        optimizer = {"0": trainer.optimizers[0].state_dict()}
        parts = {"module": dict(module.state_dict()), "optimizers": optimizer, "averages": module.averages}
        state = map_leaves(gathered, parts)
        if trainer.world.is_first:
            torch.save(_plain(state), f"{self.folder}/begins-{trainer.progress.step}-of-{trainer.world.size}.pt")


def gathered(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


class Adaptive(Deep):
    """Keeps averages, which are cut as weights are, beside an array: what is cut has no memory that one could be in."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = np.zeros(2)

    def configure_optimizers(self) -> Any:
        self.averages = {name: weight.detach().clone() for name, weight in self.named_parameters()}
        return torch.optim.AdamW(self.parameters(), lr=1e-2, amsgrad=True)

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.batches += 1
        for name, weight in self.named_parameters():
            self.averages[name].lerp_(weight.detach(), 0.1)


def go_on(folder: str, strategy: str, arguments: dict[str, Any], steps: int, *accepted: str) -> None:
    options = {"strategy_args": arguments, "accept_change": accepted}
    trainer = trainer_of(strategy, max_steps=steps, callbacks=[Witness(folder)], **options)
    logging.getLogger("midstride").addHandler(logging.FileHandler(f"{folder}/warnings-of-{trainer.world.size}"))
    trainer.fit(Adaptive(), SampleData(3, 0), run=f"{folder}/run")


@pytest.mark.parametrize(
    ("strategy", "arguments", "sizes"),
    [("sharded", {}, (3, 2, 4)), ("fully_sharded", {}, (3, 2, 4)), ("fully_sharded", {"replicas": 2}, (6, 4))],
)
def test_row_shards_are_cut_anew_for_another_world_bit_for_bit(
    strategy: str, arguments: dict[str, Any], sizes: tuple[int, ...], tmp_path: Path
) -> None:
    before: str | None = None
    for steps, size in enumerate(sizes):
        assert run_ranks(go_on, str(tmp_path), strategy, arguments, steps + 1, processes=size) == [0] * size
        begins = torch.load(tmp_path / f"begins-{steps}-of-{size}.pt")
        if before is not None:
            kept = {part: whole(tmp_path / "run", part, before) for part in ("module", "optimizers")}
            kept["averages"] = averages(tmp_path / "run", before)
            assert differences(kept, begins) == []
            warnings = (tmp_path / f"warnings-of-{size}").read_text()
            assert warnings.count("such as statistics of batch norm, differs between the ranks") == 1
            assert "norm.running_mean" in warnings
        before = SnapshotCatalog(Store.open(tmp_path / "run")).snapshots()[-1].name
        last = load_weights(Store.open(tmp_path / "run"), "last").state_dict
        assert differences(whole(tmp_path / "run", "module"), last) == []
        newest = max((tmp_path / "run" / "last").iterdir())
        written = [tensor.numel() for path in newest.glob("*.safetensors") for tensor in load_file(path).values()]
        assert sum(written) == sum({tensor.data_ptr(): tensor.numel() for tensor in last.values()}.values())


@pytest.fixture(scope="module")
def of_three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that three ranks have trained for two steps."""
    folder = tmp_path_factory.mktemp("of-three")
    assert run_ranks(go_on, str(folder), "sharded", {}, 2, processes=3) == [0] * 3
    return folder


@pytest.fixture(scope="module")
def undisturbed(of_three: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The weights after the third step, which two ranks have trained."""
    folder = tmp_path_factory.mktemp("undisturbed")
    shutil.copytree(of_three, folder, dirs_exist_ok=True)
    assert run_ranks(go_on, str(folder), "sharded", {}, 3, processes=2) == [0] * 2
    return whole(folder / "run", "module")


@pytest.mark.parametrize(("strategy", "size"), [("single", 1), ("ddp", 3)])
def test_a_strategy_that_does_not_shard_continues_with_whole_tensors(
    strategy: str, size: int, of_three: Path, tmp_path: Path
) -> None:
    shutil.copytree(of_three, tmp_path, dirs_exist_ok=True)
    run = tmp_path / "run"
    before = SnapshotCatalog(Store.open(run)).snapshots()[-1].name
    kept = {part: whole(run, part, before) for part in ("module", "optimizers")}
    assert run_ranks(go_on, str(tmp_path), strategy, {}, 3, "strategy", processes=size) == [0] * size
    begins = torch.load(tmp_path / f"begins-2-of-{size}.pt")
    assert differences({**kept, "averages": averages(run, before)}, begins) == []


class Stream(IterableDataset[Tensor]):
    """Reads the shard of its rank, and saves which one that is, and its position."""

    def __init__(self) -> None:
        self.first, self.position = -1, 0

    def __iter__(self) -> Iterator[Tensor]:
        self.first = 100 * dist.get_rank() if self.first < 0 else self.first
        while self.position < 20:
            self.position += 1
            yield torch.full((4,), float(self.first + self.position))

    def state_dict(self) -> dict[str, int]:
        return {"first": self.first, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first, self.position = state["first"], state["position"]


class Apart(TrainingModule):
    """Reads and counts otherwise on each rank. Of `last`, the third rank has no rows."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.count, self.read = 0, list[tuple[float, ...]]()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.count += 1 + self.global_rank
        self.read.append((batch[0, 0].item(), torch.rand(()).item(), self.count))
        output: Tensor = self.last(self.first(batch))
        return output.square().mean()

    def on_train_batch_end(self, *arguments: Any) -> None:
        if "average" not in self._buffers:
            self.register_buffer("average", self.last.weight.detach().clone())
            self.alias, self.chosen = self.last.weight.detach(), self.write

    def on_train_end(self) -> None:
        self.chosen()

    def write(self) -> None:
        parts = [
            tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in (self.alias, self.last.weight)
        ]
        addresses = {part.untyped_storage().data_ptr() for part in parts}
        found = {"read": self.read, "average": gathered(self.average).tolist(), "memories": len(addresses)}
        Path(self.folder, f"{self.global_rank}.json").write_text(json.dumps(found))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-6)

    def train_dataloader(self) -> Any:
        return DataLoader(Stream(), batch_size=2)


def go_apart(folder: str, strategy: str, steps: int, *accepted: str) -> None:
    logging.getLogger("midstride").addHandler(logging.FileHandler(f"{folder}/warnings-of-{strategy}"))
    trainer_of(strategy, max_steps=steps, accept_change=accepted).fit(Apart(folder), run=f"{folder}/run")


def test_each_rank_continues_with_its_own_state_without_sharding(tmp_path: Path) -> None:
    undisturbed, folder = tmp_path / "undisturbed", tmp_path / "resumed"
    undisturbed.mkdir()
    folder.mkdir()
    assert run_ranks(go_apart, str(undisturbed), "sharded", 4, processes=3) == [0] * 3
    assert run_ranks(go_apart, str(folder), "sharded", 2, processes=3) == [0] * 3
    assert run_ranks(go_apart, str(folder), "ddp", 4, "strategy", processes=3) == [0] * 3
    wanted, found = (
        [json.loads((at / f"{rank}.json").read_text()) for rank in range(3)] for at in (undisturbed, folder)
    )
    assert wanted == found
    assert [(len(one["read"]), one["read"][3][0], one["memories"]) for one in found] == [
        (4, 7.0, 1), (4, 107.0, 1), (4, 207.0, 1)
    ]  # fmt: skip
    warnings = (folder / "warnings-of-ddp").read_text()
    assert "strategy differs, as accepted" in warnings
    assert "gone" not in warnings


class Tabled(Tangled):
    """Keeps a distributed tensor, whose weights are whole."""

    def setup(self, stage: str) -> None:
        mesh = init_device_mesh("cpu", (self.trainer.world_size,))
        self.table = distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)])

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.table.to_local().add_(1 + self.global_rank)


def go_tabled(folder: str, steps: int) -> None:
    module = Tabled()
    trainer_of("ddp", max_steps=steps).fit(module, SampleData(3, 0), run=f"{folder}/run")
    Path(folder, f"{module.global_rank}.json").write_text(json.dumps(module.table.to_local().tolist()))


def test_a_distributed_tensor_beside_whole_weights_resumes(tmp_path: Path) -> None:
    for steps in (2, 3):
        assert run_ranks(go_tabled, str(tmp_path), steps, processes=2) == [0, 0]
    tables = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert tables == [[[3.0, 3.0]] * 2, [[6.0, 6.0]] * 2]


def test_weights_that_one_process_sharded_are_whole(tmp_path: Path) -> None:
    assert run_ranks(go_on, str(tmp_path), "sharded", {}, 1, processes=1) == [0]
    module = Adaptive.load_from_checkpoint(str(tmp_path / "run" / "last"))
    assert differences(whole(tmp_path / "run", "module"), dict(module.state_dict())) == []


def refuse(folder: str) -> None:
    trainer = trainer_of("sharded", max_steps=3, accept_change=["strategy"])
    with pytest.raises(NotExact, match="-g000001 was taken under a strategy without sharding"):
        trainer.fit(Adaptive(), SampleData(3, 0), run=f"{folder}/run")


def test_state_that_is_not_sharded_is_refused_by_strategies_that_shard(tmp_path: Path) -> None:
    trainer_of("single", max_steps=2).fit(Adaptive(), SampleData(3, 0), run=str(tmp_path / "run"))
    assert run_ranks(refuse, str(tmp_path), processes=2) == [0, 0]
    assert SnapshotCatalog(Store.open(tmp_path / "run")).set_aside_reasons() == {}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("phase", RESUME_PHASES)
def test_a_rank_killed_while_a_snapshot_is_read_costs_nothing(
    rank: int, phase: str, of_three: Path, undisturbed: Any, tmp_path: Path
) -> None:
    shutil.copytree(of_three, tmp_path, dirs_exist_ok=True)
    catalog = SnapshotCatalog(Store.open(tmp_path / "run"))
    before = catalog.snapshots()
    plan = FaultPlan(tmp_path / "plan").add("kill", rank=rank, step=0, phase=phase)
    codes = run_ranks(
        go_on, str(tmp_path), "sharded", {}, 3, processes=2, environment={**os.environ, **plan.environment}
    )
    plan.assert_all_fired()
    assert (codes[rank], codes[1 - rank]) == (-9, 1)
    assert (catalog.snapshots(), catalog.set_aside_reasons()) == (before, {})
    assert run_ranks(go_on, str(tmp_path), "sharded", {}, 3, processes=2) == [0] * 2
    assert differences(undisturbed, whole(tmp_path / "run", "module")) == []


def test_damage_that_no_rank_of_the_new_world_needs_sets_a_snapshot_aside(
    of_three: Path, undisturbed: Any, tmp_path: Path
) -> None:
    """The end of rank 2's file has its random numbers, which no rank of two gets."""
    shutil.copytree(of_three, tmp_path, dirs_exist_ok=True)
    catalog = SnapshotCatalog(Store.open(tmp_path / "run"))
    *_, newest = catalog.snapshots()
    flip(tmp_path / "run" / newest.path / f"{newest.stem(2)}.safetensors", 1.0)
    assert run_ranks(go_on, str(tmp_path), "sharded", {}, 3, processes=2) == [0] * 2
    assert [*catalog.set_aside_reasons()] == [newest.name]
    assert differences(undisturbed, whole(tmp_path / "run", "module")) == []


@pytest.mark.parametrize(
    ("folder", "is_torn", "is_named"),
    [("best", False, True), ("best", True, True), ("last", False, False), ("last", True, True)],
)
def test_damaged_weights_are_named_or_replaced(
    folder: str, is_torn: bool, is_named: bool, of_three: Path, undisturbed: Any, tmp_path: Path
) -> None:
    """A resume compares sizes. The best weights are read at the end; `last` has other ones then."""
    shutil.copytree(of_three, tmp_path, dirs_exist_ok=True)
    shutil.copytree(tmp_path / "run" / "last", tmp_path / "run" / "best", dirs_exist_ok=True)
    store = Store.open(tmp_path / "run")
    saved = newest_weights(store, folder)
    assert saved is not None
    file = tmp_path / "run" / saved.path / f"{saved.stem(2)}.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + (b"" if is_torn else b"~"))
    with pytest.raises(SnapshotDamaged, match=f"{saved.stem(2)}.*snapshots repair"):
        load_weights(store, folder)
    assert run_ranks(go_on, str(tmp_path), "sharded", {}, 3, processes=2) == [0] * 2
    assert differences(undisturbed, whole(tmp_path / "run", "module")) == []
    aside, said = Catalog(store, folder).set_aside_reasons(), (tmp_path / "warnings-of-2").read_text()
    assert said.count(f"weights {saved.path} are set aside, older ones count") == is_named == len(aside)
    assert folder == "best" or differences(undisturbed, load_weights(store, "last").state_dict) == []


def cut_and_note(folder: str) -> None:
    """Note what is brought to the device at once, and how many parts had been cut by then."""
    module, noted = Deep(), []
    bring = sharded.broadcast_tensors

    def note(tensors: list[Tensor], *arguments: Any) -> None:
        noted.append((sum(map(Tensor.numel, tensors)), sum(isinstance(one, FSDPModule) for one in module.modules())))
        bring(tensors, *arguments)

    sharded.broadcast_tensors = note
    trainer_of("sharded", max_steps=1).fit(module, SampleData(1, 0), run=f"{folder}/run")
    Path(folder, "noted").write_text(json.dumps(noted))


def test_a_device_never_has_more_than_one_part_whole(tmp_path: Path) -> None:
    assert run_ranks(cut_and_note, str(tmp_path), processes=1) == [0]
    noted = json.loads((tmp_path / "noted").read_text())
    block = 5 * 5 + 5
    whole = sum(tensor.numel() for tensor in (*Deep().parameters(), *Deep().buffers()))
    assert noted == [[block, 0], [block, 1], [whole - 2 * block, 2]]  # two of the four share a weight


class Refused(TrainingModule):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.turned = nn.Parameter(torch.randn(3, 2).t())
        self.words = nn.Embedding(4, 2, sparse=True)
        self.wide = nn.Parameter(torch.randn(2, dtype=torch.float64))
        self.automatic_optimization = False


class Early(Tangled):
    """Makes its optimizer too early."""

    def __init__(self) -> None:
        super().__init__()
        self.made = torch.optim.SGD(self.parameters(), lr=0.1)

    def configure_optimizers(self) -> Any:
        return self.made


class Two(Tangled):
    def training_step(self, batch: Any, batch_idx: int, optimizer_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.first, self.last)]


REFUSED: dict[str, tuple[type[TrainingModule], list[str]]] = {
    "weights": (Refused, ["scale", "(1,)", "turned", "contiguous", "words", "sparse", "float32, float64", "manual"]),
    "an optimizer made too early": (Early, ["SGD", "before strategy sharded cut", "configure_optimizers"]),
    "two optimizers": (Two, ["2 optimizers", "parameter groups", "ddp"]),
}


def refused(folder: str, module: type[TrainingModule]) -> None:
    try:
        trainer_of("sharded").fit(module(), SampleData(1, 0), run=f"{folder}/run")
    except EngineError as error:
        Path(folder, "error").write_text(str(error))
        raise


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_cut_is_named(case: str, tmp_path: Path) -> None:
    module, words = REFUSED[case]
    assert run_ranks(refused, str(tmp_path), module, processes=1) == [2]
    text = (tmp_path / "error").read_text()
    for word in words:
        assert word in text
    assert "takes no optimizer_idx" not in text
    assert not list(tmp_path.glob("run/snapshots/*"))


class Clipped(Tangled):
    """Clips by hand, which sums over the ranks in the user's own code; rank 1 dies before it."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if (self.global_rank, self.global_step) == (1, 3):
            os.kill(os.getpid(), signal.SIGKILL)
        self.log("norm", nn.utils.clip_grad_norm_(self.parameters(), 1.0).full_tensor())


class ClippedWhileWritten(Clipped):
    """Rank 1 dies before its snapshot of the step before is written, and the others wait for it there as well."""

    def on_train_start(self) -> None:
        if self.global_rank == 1:
            patch.object(Committer, "commit", lambda *_, **__: time.sleep(LIMIT_S)).start()


class Resilient(Tangled):
    """Has an optimizer that torch has not taught to step tensors that are cut."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Rprop(self.parameters())


def ends(folder: str, strategy: str, module: type[TrainingModule]) -> None:
    try:
        trainer_of(strategy).fit(module(), SampleData(8, 0), run=f"{folder}/run")
    except EngineError as error:
        Path(folder, f"{World.from_environment().rank}.txt").write_text(f"{type(error).__name__}: {error}")
        raise


@pytest.mark.parametrize("strategy", ["sharded", "fully_sharded"])
@pytest.mark.parametrize(
    ("module", "codes", "said"),
    [
        (Clipped, [1, -signal.SIGKILL, 1], "WorldError: rank {rank} lost another rank after step 3"),
        (
            ClippedWhileWritten,
            [1, -signal.SIGKILL, 1],
            "WorldError: rank {rank} lost another rank after step 3 .snapshot 000000000002-g000001 was not taken",
        ),
        (Resilient, [2, 2, 2], "UserCodeError: Traceback .*raised in Rprop.step"),
    ],
)
def test_a_retry_follows_a_lost_rank_and_no_fault_of_the_users(
    module: type[TrainingModule], codes: list[int], said: str, strategy: str, tmp_path: Path
) -> None:
    assert run_ranks(ends, str(tmp_path), strategy, module, processes=3) == codes
    heard = {path.stem: path.read_text() for path in tmp_path.glob("*.txt")}
    assert len(heard) == sum(code > 0 for code in codes)
    for rank, words in heard.items():
        assert re.match(said.format(rank=rank), words, re.DOTALL), words
