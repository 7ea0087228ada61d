"""Constants that the code of a training reads: which are named where another attempt has other values."""

import importlib
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from midstride.engine import Loop, Trainer, TrainingModule
from midstride.engine.objects.constants import constant_changes, constants_of

HEAD = """
import argparse, enum, functools, os, time
import numpy as np
import torch
from torch import nn
import a_config
from a_config import VALUE
class Scale:
    by = 1.0
    def __init__(self, by): self.by = by
def scaled(x, by=VALUE): return x
"""
#: what a script defines, `VALUE` being another one in the next attempt -> name of the constant, "" if none is named
SCRIPTS = {
    "global": ("W = VALUE", "W", "global a_script.W"),
    "global of another file": ("", "a_config.VALUE", "global a_config.VALUE"),
    "called function": ("W = VALUE\ndef f(): return W", "f()", "global a_script.W"),
    "cached function": ("W = VALUE\n@functools.cache\ndef f(): return W", "f()", "global a_script.W"),
    "default": ("", "scaled(1)", "function scaled: by"),
    "closure": (
        "def made(w):\n    def f(): return w\n    return f\nf = made(VALUE)",
        "f()",
        "function made.<locals>.f: w",
    ),
    "partial": ("f = functools.partial(max, VALUE)", "f(1)", "global a_script.f: argument 0"),
    "decorated": ("W = VALUE\n@torch.no_grad()\ndef f(): return W", "f()", "global a_script.W"),
    "numpy": ("A = np.float32(VALUE)", "A", "global a_script.A"),
    "array": ("A = np.array([VALUE, 2])", "A", "global a_script.A"),
    "objects": ("A = np.array([nn.Linear(1, 1)])", "A", ""),
    "class attribute of an attribute": ("class S:\n    by = VALUE\nclass T:\n    s = S()", "T.s.by", "class S: by"),
    "property": ("W = VALUE\nclass S:\n    @property\n    def by(self): return W", "S().by", "global a_script.W"),
    "class attribute": ("class S:\n    by = VALUE", "S.by", "class S: by"),
    "argparse": ("A = argparse.Namespace(w=VALUE, workers=VALUE)", "A.w", "global a_script.A.w"),
    "object": ("A = Scale(VALUE)", "A.by", "global a_script.A.by"),
    "dict": ("A = {'w': VALUE, 'workers': VALUE}", "A['w']", "global a_script.A['w']"),
    "dict in a dict": ("A = {'loss': {'w': VALUE}, 'out': VALUE}", "A['loss']['w']", "global a_script.A['loss']['w']"),
    "list": ("A = [0.1, VALUE]", "sum(A)", "global a_script.A"),
    "list of dicts": ("A = [{'w': VALUE}]", "A[0]['w']", "global a_script.A[0]['w']"),
    "tensor": ("A = torch.tensor([1.0, VALUE])", "A[0]", "global a_script.A"),
    "text": ("A = f'loss {VALUE}'", "A", "global a_script.A"),
    "enum": ("class Mode(enum.Enum):\n    A = 1\n    B = 2\nM = Mode(VALUE)", "M", "global a_script.M"),
    "environment": ("", "os.environ['A_WEIGHT']", "environment variable A_WEIGHT"),
    "not read": ("W = VALUE", "1", ""),
    "read by set-up": ("W = VALUE\nclass Other(Net):\n    def configure_optimizers(self): return W", "1", ""),
    "another attribute": ("A = argparse.Namespace(w=1, workers=VALUE)", "A.w", ""),
    "an attribute of that name": ("weight = VALUE", "self.weight", ""),
    "clock": ("W = time.time() + VALUE - 10", "W", ""),
    "path": ("W = f'runs/{VALUE}'", "W", ""),
    "weights": ("W = nn.Linear(VALUE, 1)", "W(1)", ""),
    "large tensor": ("W = torch.full((100_000,), VALUE)", "W[0]", ""),
}


@pytest.fixture
def patched() -> Iterator[pytest.MonkeyPatch]:
    """What a test patches here is undone before its leaks are looked for."""
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def read(source: str, expression: str, value: int, folder: Path, patched: pytest.MonkeyPatch) -> Any:
    """Return the module of a script that defines `source` and reads `expression` in training."""
    (folder / "a_config.py").write_text(f"VALUE = {value}\n")
    step = f"class Net:\n    def training_step(self, batch):\n        return {expression}\n"
    (folder / "a_script.py").write_text(HEAD + step + textwrap.dedent(source) + "\n")
    patched.setenv("A_WEIGHT", str(value))
    patched.syspath_prepend(str(folder))
    for name in ("a_config", "a_script"):
        patched.delitem(sys.modules, name, raising=False)
    importlib.invalidate_caches()
    return importlib.import_module("a_script")


@pytest.mark.parametrize(("source", "expression", "named"), SCRIPTS.values(), ids=SCRIPTS)
def test_constants_of_another_value_are_named(
    source: str, expression: str, named: str, tmp_path: Path, patched: pytest.MonkeyPatch
) -> None:
    found = []
    for value in (1, 2):
        (folder := tmp_path / str(value)).mkdir()
        script = read(source, expression, value, folder, patched)
        found.append(constants_of([script.Net, getattr(script, "Other", script.Net)], dict))
    lines = constant_changes(*found)
    assert [line.partition(" (was ")[0].partition(": ")[2] for line in lines] == ([named] if named else [])
    assert not constant_changes(found[0], found[0])


def test_a_secret_is_neither_kept_nor_shown(tmp_path: Path, patched: pytest.MonkeyPatch) -> None:
    script = read("TOKEN = f'hf_secret{VALUE}'", "TOKEN", 1, tmp_path, patched)
    assert "hf_secret" not in str(constants_of([script.Net], dict))


def test_objects_in_snapshots_are_no_constants(tmp_path: Path, patched: pytest.MonkeyPatch) -> None:
    script = read("A = Scale(VALUE)", "A.by", 1, tmp_path, patched)
    assert not [name for name in constants_of([script.Net], lambda: {id(script.A)}) if "a_script.A" in name]


WEIGHT = 1.0
DATA: Any = DataLoader(torch.arange(8.0).reshape(4, 2), 2)


def loss_of(module: nn.Module, batch: Tensor) -> Tensor:
    return WEIGHT * module(batch).square().mean()


class Net(TrainingModule):
    """Its weight of the loss is a global."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)

    def training_step(self, batch: Tensor, _index: int) -> Tensor:
        return loss_of(self.net, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


def fit(run: Path, epochs: int) -> None:
    Trainer(max_epochs=epochs, seed=1, enable_progress_bar=False).fit(Net(), DATA, run=run)


def loop(run: Path, epochs: int) -> None:
    loop = Loop(run, enable_progress_bar=False)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    loop.keep(model=model, optimizer=optimizer)
    data = loop.loader(DATA)
    for _ in loop.epochs(epochs):
        for batch in data:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    loop.close()


@pytest.mark.parametrize("train", [fit, loop])
def test_a_resume_names_them(
    train: Callable[[Path, int], None], tmp_path: Path, patched: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    named = []
    for epochs, weight in enumerate((1.0, 1.0, 0.5, 0.5), 1):
        patched.setattr(f"{__name__}.WEIGHT", weight)
        caplog.clear()
        train(tmp_path / "run", epochs)
        named.append([one.message for one in caplog.records if "reads other values" in one.message])
    assert [len(lines) for lines in named] == [0, 0, 1, 0]
    assert f"global {__name__}.WEIGHT (was 1.0, is 0.5)" in named[2][0]
