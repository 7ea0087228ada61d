"""Windows: the batches of one optimizer step, and Trainers that are refused."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from midstride.engine.errors import NotExact, UserError
from midstride.engine.huggingface import Resumable
from midstride.engine.huggingface.transformers_internals import TrainerParts
from midstride.engine.huggingface.windows import window_loader


@pytest.mark.parametrize(
    ("samples", "drop_last", "windows"), [(12, False, 2), (11, False, 2), (11, True, 2), (5, False, 1)]
)
def test_a_window_has_the_batches_of_a_step(samples: int, drop_last: bool, windows: int) -> None:
    plain = DataLoader(TensorDataset(torch.arange(samples)), 2, drop_last=drop_last)
    found = [*window_loader(plain, 2, 3)]
    assert len(found) == len(window_loader(plain, 2, 3)) == windows
    batches = [batch for window in found for batch in window]
    assert [one.tolist() for (one,) in batches] == [one.tolist() for (one,) in plain]
    assert {len(window) for window in found[:-1]} <= {3}


class Trainer:
    """Stands for a Trainer of transformers."""

    def __init__(self, **changed: Any) -> None:
        args = {"world_size": 1, "n_gpu": 0, "auto_find_batch_size": False, "report_to": [], **changed}
        self.args = SimpleNamespace(**args)
        self.is_deepspeed_enabled = self.is_fsdp_enabled = changed.get("sharded", False)
        self.train_dataset: list[int] = []


class Mine(Resumable, Trainer):
    """As a script writes it."""


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"sharded": True}, "DeepSpeed, and FSDP by accelerate"),
        ({"train_sampling_strategy": "batch_rebalance"}, "balances"),
        ({"world_size": 2, "accelerator_config": SimpleNamespace(even_batches=False)}, "even_batches=False"),
        ({"n_gpu": 4}, "DataParallel on 4 GPUs"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
    ],
)
def test_trainers_that_are_not_exact_are_refused(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(NotExact, match=words):
        Mine(**changed, run="runs/a").train()
    with pytest.raises(UserError, match="its own snapshots"):
        Mine(run="runs/a").train(resume_from_checkpoint="out/checkpoint-2")


def test_the_sums_of_a_trainer_of_trl_are_kept() -> None:
    def made() -> SimpleNamespace:
        state, control = SimpleNamespace(global_step=0), SimpleNamespace(should_log=False)
        handler = SimpleNamespace(callbacks=[])
        logged = {"train": defaultdict[str, list[float]](list), "eval": defaultdict[str, list[float]](list)}
        return SimpleNamespace(
            state=state, control=control, callback_handler=handler, _metrics=logged, _total_train_tokens=0
        )

    first, other = made(), made()
    first._metrics["train"]["entropy"] += [0.5, 0.25]
    first._total_train_tokens, first.state.global_step = 28, 2
    other._metrics["eval"]["entropy"] += [1.0]
    parts = TrainerParts(other)
    parts.load_state_dict(TrainerParts(first).state_dict())
    assert (other._total_train_tokens, other.state.global_step) == (28, 2)
    assert other._metrics == {"train": {"entropy": [0.5, 0.25]}, "eval": {}}
    assert other._metrics["train"]["new"] == []
