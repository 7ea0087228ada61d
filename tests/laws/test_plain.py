"""Law 4: undisturbed, a run gives the bits of the hand-written script."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from laws.horovod_world import needs_horovod, run_horovod_ranks
from laws.lives import Samples
from laws.plain import BATCH, EPOCHS, SEED, Net, lbfgs, plain, plain_closure, plain_parts
from laws.plain_pipeline import BATCH as pipeline_batch
from laws.plain_pipeline import layers, plain_pipeline
from laws.plain_sharded import DeepNet, own, plain_sharded
from laws.xla_world import XLA_RANKS, run_xla_ranks
from support.tiers import everything
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from midstride.engine import Trainer, TrainingModule
from midstride.engine.snapshots.reader import weights_at
from midstride.engine.state.differences import differences
from midstride.engine.testing import run_ranks


class NetModule(TrainingModule, Net):
    """The oracle's net as a module."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, _ = batch
        loss = cross_entropy(self(x), y)
        self.log("train/loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class CurvedModule(NetModule):
    """The same with LBFGS."""

    def configure_optimizers(self) -> Any:
        optimizer = lbfgs(self)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class DeepModule(NetModule, DeepNet):
    """The same with a list of blocks."""


def ours(
    path: str,
    samples: int,
    window: int,
    clip: float | None,
    batch: int = BATCH,
    kind: type[TrainingModule] = NetModule,
    **options: Any,
) -> None:
    trainer = Trainer(
        seed=SEED,
        max_epochs=EPOCHS,
        accumulate_grad_batches=window,
        gradient_clip_val=clip,
        snapshots={"every_steps": 2},
        enable_progress_bar=False,
        **options,
    )
    module = kind()
    trainer.fit(module, DataLoader(Samples(samples, noise=0.0), batch, shuffle=True), run=f"{path}/run")
    state = {"weights": module.state_dict(), "optimizer": trainer.optimizers[0].state_dict()}
    torch.save(own(state), f"{path}/rank-{trainer.world.rank}.pt")


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(("window", "clip"), [(1, None), (3, 0.5)])
def test_an_undisturbed_run_has_the_bits_of_the_plain_script(
    ranks: int, window: int, clip: float | None, tmp_path: Path
) -> None:
    samples = 7 * BATCH * ranks - ranks - 1
    assert_same_bits(
        tmp_path,
        ranks,
        partial(plain, samples=samples, window=window, clip=clip),
        partial(ours, samples=samples, window=window, clip=clip),
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_in_16_bits_gradients_are_clipped_at_their_true_size(ranks: int, tmp_path: Path) -> None:
    choice: dict[str, Any] = {"samples": 7 * BATCH * ranks - 1, "window": 3, "clip": 0.05}
    assert_same_bits(tmp_path, ranks, partial(plain, **choice, scaled=True), partial(ours, **choice, precision="16"))


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_lbfgs_has_the_bits_of_a_script_with_a_closure(ranks: int, clip: float | None, tmp_path: Path) -> None:
    choice: dict[str, Any] = {"samples": 4 * BATCH * ranks - ranks - 1, "clip": clip}
    mine = partial(ours, **choice, window=1, kind=CurvedModule)
    assert_same_bits(tmp_path, ranks, partial(plain_closure, **choice), mine)


#: strategy and ranks, parts, window: few have each pair
SPLIT = [(*strategy, parts, window) for strategy in (("dp", 1), ("ddp2", 2)) for parts in (2, 4) for window in (1, 3)]
FEW = {("dp", 1, 2, 1), ("dp", 1, 4, 1), ("dp", 1, 4, 3), ("ddp2", 2, 2, 3), ("ddp2", 2, 4, 1)}


@pytest.mark.parametrize(
    ("strategy", "ranks", "parts", "window"),
    [pytest.param(*cell, marks=() if cell in FEW else everything) for cell in SPLIT],
)
def test_split_batches_have_the_bits_of_a_script_that_splits(
    strategy: str, ranks: int, parts: int, window: int, tmp_path: Path
) -> None:
    batch = 2 * parts
    samples = 7 * batch * ranks  # whole batches: batch statistics need two samples
    assert_same_bits(
        tmp_path,
        ranks,
        partial(plain_parts, samples=samples, batch=batch, parts=parts, window=window),
        partial(ours, samples=samples, window=window, clip=None, batch=batch, strategy=strategy, devices=parts),
    )


@pytest.mark.parametrize(("strategy", "ranks"), [("sharded", 2), ("sharded", 3), ("fully_sharded", 3)])
@pytest.mark.parametrize(("window", "clip"), [(1, None), (3, 0.5)])
def test_sharded_training_has_the_bits_of_a_fully_shard_script(
    strategy: str, ranks: int, window: int, clip: float | None, tmp_path: Path
) -> None:
    choice: dict[str, Any] = {"samples": 7 * BATCH * ranks - ranks - 1, "window": window, "clip": clip}
    script = partial(plain_sharded, **choice, frees=strategy == "fully_sharded")
    assert_same_bits(tmp_path, ranks, script, partial(ours, **choice, kind=DeepModule, strategy=strategy))


@pytest.mark.parametrize(
    ("ranks", "arguments", "options", "plain"),
    [(4, {"replicas": 2}, {}, {"replicas": 2}), (3, {"param_dtype": "bf16"}, {"precision": "bf16"}, {"bf16": True})],
    ids=["replicas", "bf16"],
)
def test_sharded_options_have_the_bits_of_a_fully_shard_script(
    ranks: int, arguments: dict[str, Any], options: dict[str, Any], plain: dict[str, Any], tmp_path: Path
) -> None:
    choice: dict[str, Any] = {"samples": 7 * BATCH * ranks - ranks - 1, "window": 3, "clip": 0.5}
    script = partial(plain_sharded, **choice, **plain, frees=True)
    mine = partial(ours, **choice, kind=DeepModule, strategy="fully_sharded", strategy_args=arguments, **options)
    assert_same_bits(tmp_path, ranks, script, mine)


@needs_horovod
@pytest.mark.parametrize(("ranks", "window", "clip"), [(2, 1, None), (3, 1, None), (3, 3, 0.5)])
def test_horovod_has_the_bits_of_a_horovodrun_script(
    ranks: int, window: int, clip: float | None, tmp_path: Path
) -> None:
    from laws.plain_horovod import plain_flat, plain_horovod

    samples = 7 * BATCH * ranks - ranks - 1
    script = partial(plain_flat, samples=samples, window=window, clip=clip)
    if ranks == 2:
        script = partial(plain_horovod, samples=samples)
    mine = partial(ours, samples=samples, window=window, clip=clip)
    assert_same_bits(tmp_path, ranks, script, mine, start=run_horovod_ranks)


@pytest.mark.parametrize("ranks", XLA_RANKS)
@pytest.mark.parametrize(("window", "clip"), [(1, None), (3, 0.5)])
def test_xla_has_the_bits_of_a_torch_xla_script(ranks: int, window: int, clip: float | None, tmp_path: Path) -> None:
    choice: dict[str, Any] = {"samples": 7 * BATCH * ranks - ranks - 1, "window": window, "clip": clip}
    script, mine = partial(_plain_xla, **choice), partial(ours, **choice, strategy="xla")
    assert_same_bits(tmp_path, ranks, script, mine, start=run_xla_ranks)


def _plain_xla(path: str, **choice: Any) -> None:
    from laws.plain_xla import plain_xla  # where there is a torch_xla

    plain_xla(path, **choice)


class Stages(TrainingModule):
    """The oracle's layers as a module."""

    def __init__(self) -> None:
        super().__init__()
        self.sequential_module = layers()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.sequential_module(batch[0])

    def training_step_end(self, outputs: Tensor, batch: Any) -> Tensor:
        return cross_entropy(outputs, batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def pipelined(path: str, samples: int, window: int, clip: float | None, **options: Any) -> None:
    trainer = Trainer(
        seed=SEED,
        max_epochs=EPOCHS,
        strategy="pipeline",
        strategy_args={"micro_batches": 4, **options},
        accumulate_grad_batches=window,
        gradient_clip_val=clip,
        enable_progress_bar=False,
    )
    data = DataLoader(Samples(samples, noise=0.0), pipeline_batch, shuffle=True)
    trainer.fit(Stages(), data, run=f"{path}/run")


@pytest.mark.parametrize(
    ("ranks", "window", "clip", "options"),
    [
        (2, 1, None, {"balance": [6, 3], "schedule": "gpipe"}),
        (3, 3, 0.5, {"checkpoint": True}),
        (4, 1, 0.5, {"stages": 2}),
    ],
)
def test_a_pipeline_has_the_bits_of_a_script_on_one_device(
    ranks: int, window: int, clip: float | None, options: dict[str, Any], tmp_path: Path
) -> None:
    pipelines = ranks // options.get("stages", ranks)
    samples = (7 * pipeline_batch - 5) * pipelines  # a last batch of 3, which 4 does not divide
    plainly = partial(plain_pipeline, samples=samples, parts=4, window=window, clip=clip)
    assert run_ranks(plainly, str(tmp_path), processes=pipelines) == [0] * pipelines
    ours = partial(pipelined, samples=samples, window=window, clip=clip, **options)
    assert run_ranks(ours, str(tmp_path), processes=ranks) == [0] * ranks
    module = Stages()
    module.load_state_dict(weights_at(str(tmp_path / "run" / "last")).state_dict)
    assert not differences(torch.load(tmp_path / "weights.pt"), module.sequential_module.state_dict())


def assert_same_bits(folder: Path, ranks: int, *trainings: Callable[[str], None], start: Any = run_ranks) -> None:
    """Let every training write its state, in ranks that `start` starts, and compare."""
    states = []
    for number, train in enumerate(trainings):
        run = folder / str(number)
        run.mkdir()
        assert start(train, str(run), processes=ranks) == [0] * ranks
        states.append([torch.load(run / f"rank-{rank}.pt") for rank in range(ranks)])
    for rank, (expected, found) in enumerate(zip(*states, strict=True)):
        assert not differences(expected, found), f"rank {rank}"
