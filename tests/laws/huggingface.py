"""Lives of docs/examples/huggingface: undisturbed, and killed on the way. Called in a fork, which imports it once."""

import importlib
import json
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

from laws.lightning.lives import life

from midstride.engine import Trainer, World
from midstride.engine.fault_injection import FaultPlan
from midstride.engine.seeds import seed_everything
from midstride.engine.session.replay_plan import NEVER

EXAMPLE = Path(__file__).parents[2] / "docs/examples/huggingface"
#: where each run dies, on which rank: once in a step, once in a validation
DEATHS = ((3, "backward", 1), (6, "validation", 0))
#: what is trained, on how many ranks
ROWS: dict[str, dict[str, Any]] = {
    "rows on 2 ranks, gradient checkpointing, frozen parts": {
        "ranks": 2,
        "module": {"gradient_checkpointing": True, "frozen": ("model.layers.0",)},
    },
    "a stream, words hidden by the collator": {"data": {"streaming": True, "mlm": True}},
}


def live_all(folder: Path) -> None:
    """Give every row its lives; how they ended goes to a file of its name."""
    warnings.simplefilter("ignore")
    for name in World().environment:  # no rank of a world: some lives start their own
        os.environ.pop(name, None)
    sys.path.insert(0, str(EXAMPLE))
    for module in ("model", "transformers.models.llama.modeling_llama"):
        importlib.import_module(module)  # here, and not in each life: seconds
    for name, row in ROWS.items():
        try:
            told = {"codes": lives_of(row, folder / name)}
        except BaseException:
            told = {"error": traceback.format_exc()}
        (folder / f"{name}.json").write_text(json.dumps(told))


def lives_of(row: dict[str, Any], folder: Path) -> list[int]:
    """Return how the lives of one row ended, the undisturbed one first."""
    plan = FaultPlan(folder / "plan")
    calm = FaultPlan(folder / "plan")
    codes = [life(calm, train, row, folder / "undisturbed", NEVER)]
    for step, phase, rank in DEATHS:
        plan.add("kill", step=step, phase=phase, rank=min(rank, row.get("ranks", 1) - 1))
    codes += [life(plan, train, row, folder / "run", 1) for _ in range(len(DEATHS) + 1)]
    plan.assert_all_fired()
    return codes


def train(row: dict[str, Any], run: Path, every_steps: int) -> None:
    """Train eight steps, two epochs of them, from wherever `run` stands."""
    import model  # the example

    ranks = row.get("ranks", 1)
    seed_everything(3)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    data = model.SortedLetters(lines=16 * ranks, batch_size=4, **row.get("data", {}))
    strategy = {"strategy": "ddp_fork", "devices": ranks} if ranks > 1 else {"strategy": "single"}
    trainer = Trainer(
        seed=3, max_epochs=2, snapshots={"every_steps": every_steps}, enable_progress_bar=False, **strategy
    )
    trainer.fit(model.LanguageModel(**row.get("module", {})), data, run=run)
