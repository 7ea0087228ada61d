"""`midstride check --determinism`: the operation that is not repeatable is named, with its line."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("forked_worlds")

_CODE = """
import time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from midstride.engine import DataModule, TrainingModule


class Samples(Dataset):
    def __init__(self, kind): self.kind = kind
    def __len__(self): return 16
    def __getitem__(self, index):
        x = torch.arange(4.0) + index
        return x + time.time_ns() % 1000 if self.kind == "data" else x


class Data(DataModule):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def train_dataloader(self):
        return DataLoader(Samples(self.kind), batch_size=4, shuffle=True)


class Net(TrainingModule):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))

    def training_step(self, batch, batch_idx):
        out = self.net(batch)
        if self.kind == "generator":
            unseeded = torch.Generator()
            unseeded.seed()
            out = out + torch.rand(4, 1, generator=unseeded)
        if self.kind == "clock":
            out = out * (1 + time.time() % 1)
        return out.square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)
"""


def _line(text: str) -> int:
    return next(number for number, row in enumerate(_CODE.splitlines(), 1) if text in row)


#: what is not repeatable -> texts in the message
CAUSES = {
    "nothing": ("is in order, and repeats its bits",),
    "generator": (
        "rank 0, loss: loss 0",
        "other bits for the same arguments: rand at ",
        f"code_of_job.py:{_line('torch.rand(4')}",
    ),
    "clock": ("rank 0, loss: loss 0", "a clock or an unseeded generator: mul at", f".py:{_line('out * (1')}"),
    "data": ("gave another sample when it was read again with the same seeds",),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_a_cause_is_named(cause: str, tmp_path: Path, said: Callable[..., tuple[object, str]]) -> None:
    (tmp_path / "code_of_job.py").write_text(_CODE)
    kind = {"kind": cause}
    job = {"name": "tiny", "module": "code_of_job:Net", "module_args": kind, "data": "code_of_job:Data"}
    job |= {"data_args": kind, "trainer": {"max_steps": 8}, "snapshots": {"url": "runs"}}
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    code, printed = said("check", f"{tmp_path}/job.yaml", "--determinism")
    text = " ".join(printed.split())
    assert code == (0 if cause == "nothing" else 2), text
    assert all(expected in text for expected in CAUSES[cause]), text
    assert not (tmp_path / "runs" / "check").exists()
