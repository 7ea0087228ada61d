"""Classifies points by a training loop of its own; started again after a death, it continues exactly."""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from midstride.engine import Loop


def points(count: int, seed: int) -> TensorDataset:
    """Return points in a square, and in which of three rings around its middle each is."""
    x = torch.rand(count, 2, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return TensorDataset(x, (x.norm(dim=1) * 2).long().clamp(max=2))


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset) -> Tensor:
    """Return the share of points that are classified right."""
    model.eval()
    x, y = data.tensors
    right = (model(x).argmax(1) == y).float().mean()
    model.train()
    return right


def main(run: str | None, epochs: int) -> None:
    """Train to the end; without a run, as the script of a job, which brings its own."""
    loop = Loop(run, seed=7, snapshots={"every_steps": 20}, accelerator="cpu")
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    loop.keep(model=model, optimizer=optimizer, scheduler=scheduler)
    train = loop.loader(DataLoader(points(1600, 0), batch_size=32, shuffle=True))
    held_out = points(400, 1)
    loop.state.best = 0.0
    for epoch in loop.epochs(epochs):
        for x, y in train:
            loss = F.cross_entropy(model(x + 0.01 * torch.randn_like(x)), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loop.log("train/loss", loss)
        scheduler.step()
        right = accuracy(model, held_out).item()
        loop.log("val/accuracy", right)
        if right > loop.state.best:
            loop.state.best = right
            loop.save_weights("best")
        if loop.rank == 0:
            print(f"epoch {epoch}: {right:.3f} right, at best {loop.state.best:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", help="folder or URL of the run; a job has one")
    parser.add_argument("--epochs", type=int, default=10)
    given = parser.parse_args()
    main(given.run, given.epochs)
