"""Evaluations outside a fit: what they read, and what hooks see in them."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from midstride.engine import Trainer, TrainingModule
from midstride.engine.errors import UserError


class Doubling(TrainingModule):
    """Trains a weight; what is evaluated is the batch alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self._seen: list[Any] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.layer(batch[:, None]).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test/rows", float(len(batch)), reduce_fx="sum")

    def predict_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return 2 * batch


def rows() -> DataLoader[Any]:
    return DataLoader(torch.arange(6.0), 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("evaluate", ["test", "predict"])
def test_an_evaluation_stands_where_the_fit_before_it_ended(evaluate: str) -> None:
    class Standing(Doubling):
        def on_test_start(self, *_: Any) -> None:
            self._seen.append((self.current_epoch, self.global_step))

        on_test_batch_end = on_predict_start = on_predict_batch_end = on_test_start

    module, trainer = Standing(), Trainer(max_epochs=2, enable_progress_bar=False)
    trainer.fit(module, rows())
    getattr(trainer, evaluate)(module, rows())
    assert set(module._seen) == {(2, 6)}
    assert (trainer.current_epoch, trainer.global_step) == (2, 6)


def test_predictions_are_of_all_batches_whatever_a_test_is_limited_to() -> None:
    trainer = Trainer(limit_test_batches=1, enable_progress_bar=False)
    assert trainer.test(Doubling(), rows()) == {"test/rows": 2.0}
    assert torch.cat(trainer.predict(Doubling(), rows())).tolist() == [0, 2, 4, 6, 8, 10]


def test_hooks_of_a_prediction_get_its_lanes_once_a_batch() -> None:
    class Hooked(Doubling):
        def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self._seen.append({lane: len(samples) for lane, samples in batch.items()})

        def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            assert all(torch.equal(outputs[lane], 2 * samples) for lane, samples in batch.items())

    module, trainer = Hooked(), Trainer(lanes=2, enable_progress_bar=False)
    predicted = torch.cat(trainer.predict(module, rows()))
    assert sorted(predicted.tolist()) == [0, 2, 4, 6, 8, 10]
    assert module._seen == [{0: 1, 1: 1}] * 3 or module._seen == [{0: 2, 1: 2}, {0: 1, 1: 1}]


def test_a_prediction_without_data_is_refused() -> None:
    with pytest.raises(UserError, match="there is no predict loader: write predict_dataloader"):
        Trainer(enable_progress_bar=False).predict(Doubling())
