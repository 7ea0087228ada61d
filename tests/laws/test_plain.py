"""Law 4: undisturbed, a run gives the bits of the hand-written script."""

from pathlib import Path
from typing import Any

import pytest
import torch
from laws.lives import Samples
from laws.plain import BATCH, EPOCHS, SEED, Net, plain
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from midstride.engine import Trainer, TrainingModule
from midstride.engine.snapshots.codec import differences
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


def ours(path: str, samples: int, window: int, clip: float | None) -> None:
    trainer = Trainer(
        seed=SEED,
        max_epochs=EPOCHS,
        accumulate_grad_batches=window,
        gradient_clip_val=clip,
        snapshots={"every_steps": 2},
        enable_progress_bar=False,
    )
    module = NetModule()
    trainer.fit(module, DataLoader(Samples(samples, noise=0.0), BATCH, shuffle=True), run=f"{path}/run")
    state = {"weights": module.state_dict(), "optimizer": trainer.optimizers[0].state_dict()}
    torch.save(state, f"{path}/rank-{trainer.world.rank}.pt")


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(("window", "clip"), [(1, None), (3, 0.5)])
def test_an_undisturbed_run_has_the_bits_of_the_plain_script(
    ranks: int, window: int, clip: float | None, tmp_path: Path
) -> None:
    states = []
    for train in (plain, ours):
        folder = tmp_path / train.__name__
        folder.mkdir()
        codes = run_ranks(train, str(folder), 7 * BATCH * ranks - ranks - 1, window, clip, processes=ranks)
        assert codes == [0] * ranks
        states.append([torch.load(folder / f"rank-{rank}.pt") for rank in range(ranks)])
    for rank, (expected, found) in enumerate(zip(*states, strict=True)):
        assert not differences(expected, found), f"rank {rank}"
