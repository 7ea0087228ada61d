"""Evaluations and predictions on a GPU: no batch is waited for, and what is predicted comes to the host."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu.conftest import Machine
from gpu.test_no_wait import Module, data
from gpu.test_two_devices import GPUS, on_gpu
from support.device_waits import WaitCounter, as_on_a_device
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from midstride.engine import Callback, Trainer
from midstride.engine.training.evaluation import PredictionLoop


class Evaluated(Module):
    """Logs in each way there is, in its steps and in a hook."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        self.log("all", loss, add_dataloader_idx=False)
        self.log("both", loss, on_step=True, on_epoch=True)
        self.log("largest", loss, reduce_fx="max")
        self.log("synced", loss, sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"y": self.net(batch[0]), "of": dataloader_idx}

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("of a hook", self.net.weight.sum())


class Between(Callback):
    """Keeps how many waits there were by the start of each batch."""

    def __init__(self, counter: WaitCounter) -> None:
        self.counter, self.at_start = counter, list[int]()

    def on_validation_batch_start(self, trainer: Any, module: Any, *batch: Any) -> None:
        self.at_start.append(self.counter.total)

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start


def _fit(trainer: Trainer, run: Path) -> None:
    trainer.fit(Evaluated(), data(), [data(), data()], run=run)


#: what is evaluated, and in how many batches
CALLS: dict[str, tuple[Any, int]] = {
    "in a fit": (_fit, 48),
    "validate": (lambda trainer, run: trainer.validate(Evaluated(), [data(), data()]), 48),
    "test": (lambda trainer, run: trainer.test(Evaluated(), data()), 24),
    "predict": (lambda trainer, run: trainer.predict(Evaluated(), [data(), data()]), 48),
}


@pytest.mark.parametrize("options", [{}, {"strategy": "dp", "devices": 2}, {"precision": "bf16"}], ids=str)
@pytest.mark.parametrize("call", CALLS)
def test_no_batch_of_an_evaluation_waits(call: str, options: dict[str, Any], tmp_path: Path) -> None:
    evaluate, batches = CALLS[call]
    with as_on_a_device(), WaitCounter() as counter:
        between = Between(counter)
        trainer = Trainer(max_epochs=1, enable_progress_bar=False, callbacks=[between], snapshots=None, **options)
        evaluate(trainer, tmp_path)
        assert len(between.at_start) == batches
        assert len(set(between.at_start)) == 1
        assert call == "predict" or counter.total > between.at_start[0]  # what was logged is read in the end


@pytest.mark.parametrize("lanes", [None, 2])
def test_predictions_of_a_gpu_come_to_the_host(
    lanes: int | None, fake: FakeTensorMode, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(2)
    monkeypatch.setattr(torch.cuda, "default_generators", [torch.Generator(), torch.Generator()])
    trainer = Trainer(max_epochs=1, lanes=lanes)
    trainer.strategy.attach(trainer.world, GPUS[1:])
    module: Any = on_gpu(Evaluated(), GPUS[1])
    loaders: Any = [SimpleNamespace(weight=3)] * 2
    loop = PredictionLoop(trainer._context_of(module, trainer.progress), loaders)
    batch = [torch.zeros(3, 4).to(GPUS[1])]
    outputs = loop.run_batch(
        batch if lanes is None else {0: batch}, 0, 1
    )  # a second lane would be tried by deep copies
    made: dict[str, Tensor] = outputs if lanes is None else outputs[0]
    assert made["y"].device == GPUS[1]
    assert loop.predictions[0] == []
    assert [(one["y"].device.type, one["of"]) for one in loop.predictions[1]] == [("cpu", 1)]
