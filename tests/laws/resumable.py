"""Lives of `Resumable` Trainers of transformers: plain, undisturbed and killed, in forks of one that imported it."""

import importlib
import json
import os
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from laws.prepared import life
from torch.utils.data import Dataset

from midstride.engine.fault_injection import FaultPlan
from midstride.engine.world import World

#: what is trained -> number of processes, and where the last one dies: after how many steps, in which phase of `Deaths`
ROWS = {
    "a causal LM, windows of three batches": (1, ((3, "backward"), (6, "forward"))),
    "a classifier, evaluations, checkpoints, the best model": (1, ((3, "validation"), (6, "optimizer_step"))),
    "a causal LM on 3 processes": (3, ((2, "backward"), (4, "forward"))),
    "a classifier on 3 processes, the best model": (3, ((1, "validation"), (3, "forward"))),
}
_OF_TIME = ("_runtime", "_per_second")


class Words(Dataset[Any]):
    """Words of five letters, each with its label."""

    def __init__(self, count: int, *, labelled: bool) -> None:
        self._words = torch.randint(1, 24, (count, 5), generator=torch.Generator().manual_seed(count))
        self._labelled = labelled

    def __len__(self) -> int:
        return len(self._words)

    def __getitem__(self, index: int) -> dict[str, Any]:
        word = self._words[index]
        return {"input_ids": word, "labels": word[0] % 3 if self._labelled else word}


def live_all(folder: Path) -> None:
    """Give every row its lives; how they ended goes to a file of its name."""
    warnings.simplefilter("ignore")
    importlib.import_module("transformers.trainer")  # here, and not in each life
    for name in World().environment:
        os.environ.pop(name, None)
    for name, (ranks, deaths) in ROWS.items():
        try:
            told: dict[str, Any] = {"codes": lives_of(name, ranks, deaths, folder / name)}
        except BaseException:
            told = {"error": traceback.format_exc()}
        (folder / f"{name}.json").write_text(json.dumps(told))


def lives_of(name: str, ranks: int, deaths: Any, folder: Path) -> list[list[int]]:
    """Return how the lives of one row ended: the plain and the undisturbed one first, one of a done run last."""
    plan, calm = FaultPlan(folder / "plan"), FaultPlan(folder / "calm")
    codes = [life(calm, train, name, folder / "plain", True, ranks=ranks)]
    codes += [life(calm, train, name, folder / "undisturbed", ranks=ranks)]
    for step, phase in deaths:
        plan.add("kill", step=step, phase=phase, rank=ranks - 1)
    codes += [life(plan, train, name, folder / "killed", ranks=ranks) for _ in range(len(deaths) + 2)]
    plan.assert_all_fired()
    return codes


def train(name: str, folder: Path, plain: bool = False) -> None:
    """Train from wherever the run in `folder` stands, and write what it ends with."""
    import transformers

    labelled = "classifier" in name
    shared: dict[str, Any] = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    shared |= {"num_attention_heads": 2, "max_position_embeddings": 8, "pad_token_id": 0}
    transformers.set_seed(1)
    if labelled:
        model: Any = transformers.BertForSequenceClassification(transformers.BertConfig(**shared, num_labels=3))
        own: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "save_total_limit": 2}
        own |= {"load_best_model_at_end": True, "metric_for_best_model": "accuracy", "num_train_epochs": 2}
    else:
        config = transformers.LlamaConfig(**shared, num_key_value_heads=2, attention_dropout=0.1)
        model = transformers.LlamaForCausalLM(config)
        own = {"gradient_accumulation_steps": 3, "num_train_epochs": 3, "save_strategy": "no"}
        own |= {"ddp_find_unused_parameters": False}  # so that the order of sums has to be replayed
    args = transformers.TrainingArguments(
        str(folder / "out"),
        per_device_train_batch_size=2,
        logging_steps=1,
        learning_rate=0.01,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        seed=3,
        **own,
    )
    given: dict[str, Any] = {
        "model": model,
        "args": args,
        "train_dataset": Words(16 * args.world_size - labelled, labelled=labelled),
    }
    counted = _counting()
    if labelled:
        patience = transformers.EarlyStoppingCallback(4)
        given |= {"eval_dataset": Words(12, labelled=True), "compute_metrics": _accuracy, "callbacks": [patience]}
    given["callbacks"] = [*given.get("callbacks", []), counted, _deaths()]
    if plain:
        trainer: Any = transformers.Trainer(**given)
    else:
        from midstride.engine.huggingface import Resumable

        class MyTrainer(Resumable, transformers.Trainer):  # type: ignore[misc]
            """As a script writes it, with attributes of its own."""

            def __init__(self, **given: Any) -> None:
                super().__init__(**given)
                self.losses, self.calls = list[float](), 0

            def compute_loss(self, *arguments: Any, **options: Any) -> Any:
                loss = super().compute_loss(*arguments, **options)
                if self.is_in_train and self.model.training:
                    self.calls += 1
                    self.losses.append(loss.item() * self.calls)
                return loss

        trainer = MyTrainer(**given, run=str(folder / "run"), snapshots={"every_steps": 1})
    output = trainer.train()
    ended = {
        "weights": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "optimizer": [dict(state) for state in trainer.optimizer.state.values()],
        "rates": trainer.lr_scheduler.get_last_lr(),
        "drawn": torch.get_rng_state(),
        "log": [{key: row[key] for key in row if not key.endswith(_OF_TIME)} for row in trainer.state.log_history],
        "best": Path(trainer.state.best_model_checkpoint or "").name,
        "counted": counted.steps,
        "output": (output.global_step, output.training_loss),
        "own": () if plain else (trainer.calls, trainer.losses),
    }
    torch.save(ended, folder / f"ended-{args.process_index}.pt")


def _accuracy(predicted: Any) -> dict[str, float]:
    return {"accuracy": float((predicted.predictions.argmax(1) == predicted.label_ids).mean())}


def _counting() -> Any:
    from transformers import TrainerCallback

    class Counting(TrainerCallback):
        """A callback of a user's with a state of its own."""

        def __init__(self) -> None:
            self.steps = 0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.steps += 1

    return Counting()


def _deaths() -> Any:
    from transformers import TrainerCallback

    plan = FaultPlan.from_environment()

    class Deaths(TrainerCallback):
        """Kills the process where a plan says so."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            plan.at(args.process_index, state.global_step, "forward")

        def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            plan.at(args.process_index, state.global_step, "backward")

        def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            plan.at(args.process_index, state.global_step, "validation")

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            plan.at(args.process_index, state.global_step, "optimizer_step")

    return Deaths()
