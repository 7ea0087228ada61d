"""The same training as `script.py`, written out by hand: what there is to compare with, and nothing that resumes."""

import torch
from model import Classifier, Digits
from torch.nn import functional as F

SEED, EPOCHS = 7, 40


def accuracy(module: Classifier, data: Digits, stage: str) -> float:
    """Return the share of images of `stage`, "val" or "test", whose digit is found."""
    module.eval()
    with torch.no_grad():
        right = [module(x).argmax(dim=1) == y for x, y in getattr(data, f"{stage}_dataloader")()]
    return torch.cat(right).float().mean().item()


def train(module: Classifier, data: Digits) -> None:
    """Train, and leave the module with the weights that did best in validation."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=module.learning_rate)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    loader, best, weights = data.train_dataloader(), -1.0, module.state_dict()
    for epoch in range(EPOCHS):
        module.train()
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(module(images), labels).backward()
            optimizer.step()
        scheduler.step()
        score = accuracy(module, data, "val")
        print(f"epoch {epoch}: val/accuracy {score:.4f}")
        if score > best:
            best, weights = score, {name: value.clone() for name, value in module.state_dict().items()}
    module.load_state_dict(weights)


if __name__ == "__main__":
    torch.manual_seed(SEED)
    data, module = Digits(batch_size=32), Classifier()
    data.prepare_data()
    data.setup("fit")
    train(module, data)
    print({"test/accuracy": accuracy(module, data, "test")})
