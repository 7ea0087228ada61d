"""Sets of strings in a script: their order is another in each interpreter, which is told."""

import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
from distributed.test_starting import MODULE

from midstride.engine import TrainingModule
from midstride.engine.checkpointing.text_order import sets_in, text_order_warnings

SCRIPT = f"""{MODULE}
if __name__ == "__main__":
    words = {{word: number for number, word in enumerate({{"a", "b", "c"}})}}  # of which the data do not depend
    rows = torch.tensor([[float(number)] * 4 for number in range(8)])
    trainer = Trainer(devices=2, strategy=sys.argv[1], max_steps=int(sys.argv[2]), seed=1)
    trainer.fit(Line(), DataLoader(TensorDataset(rows), 2), run=sys.argv[3])
"""

RANKS, LIVES = "on each rank", "from when the snapshot was taken"


def life(folder: Path, strategy: str, steps: int) -> list[str]:
    """Return how strings hash in one life of the script, as its warnings say."""
    environment = {name: text for name, text in os.environ.items() if name not in ("PYTHONHASHSEED", "RANK")}
    (folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(folder / "script.py"), strategy, str(steps), str(folder / "run")]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    return re.findall(r"strings hash differently (.*), so sets of .* script\.py:\d+ make", done.stdout)


def test_another_order_on_each_rank_is_told(tmp_path: Path) -> None:
    assert life(tmp_path, "ddp", 2) == [RANKS]


def test_another_order_than_that_of_the_life_before_is_told(tmp_path: Path) -> None:
    # the ranks are fresh processes, which hash alike
    assert [life(tmp_path, "ddp_spawn", steps) for steps in (2, 4)] == [[], [LIVES]]


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("words = set(text)\nother = {word for word in text}\nthird = {'a', name}", [1, 2, 3]),
        ("bucket = hash(word) % 10", [1]),
        ("words = sorted(set(text) - {'a'})\nnumber = len({*text})", []),
        ("if word in {'a', 'b'} and set(one) == set(other): pass", []),
        ("sizes = {1, 2}\nempty = {}", []),
        ("%matplotlib inline", []),
    ],
)
def test_a_set_whose_order_may_matter_is_found(source: str, lines: list[int]) -> None:
    assert sets_in(source) == lines


def test_a_program_without_a_file_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    assert text_order_warnings([TrainingModule], {"text_hash": 1}, [{"text_hash": 2}]) == []


def test_of_strings_that_hash_alike_nothing_is_said() -> None:
    alike = {"text_hash": 1}
    assert text_order_warnings([TrainingModule], alike, [alike, alike]) == []
    assert text_order_warnings([TrainingModule], {}, [alike]) == []  # of an earlier version
