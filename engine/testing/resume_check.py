"""`assert_resumes_exactly`: tests that a resumed training ends with the same bits."""

import importlib
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from midstride.engine.modules.module import TrainingModule
from midstride.engine.objects.digest import differing_lines
from midstride.engine.snapshots.catalog import Snapshot, SnapshotCatalog
from midstride.engine.snapshots.parent import open_run
from midstride.engine.snapshots.reader import read
from midstride.engine.state.differences import iter_differences
from midstride.engine.state.object_nodes import instances_in
from midstride.engine.storage.store import Store
from midstride.engine.testing.batch_journal import first_difference
from midstride.engine.testing.child_run import ChildRun

__all__ = ["assert_resumes_exactly", "final_state"]

#: positions at which the run is cut off
CUTS = 5
#: path in a state that a stream gave, which may count what a resume does not need, and which the trial has judged
_OF_A_STREAM = re.compile(r"feeds/(.*/)?states/\d+/state/")
_NEW_INTERPRETER = ", in a new interpreter with another order of sets of strings and lists of files"
#: lines that a failure message shows of each section
SHOWN = 8


def final_state(run: str) -> list[Any]:
    """Return the state tree of every rank in the newest good snapshot of `run`."""
    store = open_run(run)
    snapshot = SnapshotCatalog(store).newest_good()
    if snapshot is None:
        raise AssertionError(f"{run} holds no good snapshot")
    return [read(store, snapshot, rank) for rank in range(snapshot.manifest["world_size"])]


def assert_resumes_exactly(
    module: TrainingModule | Callable[[], TrainingModule],
    data: Any = None,
    *,
    steps: int = 6,
    in_new_interpreter: bool = False,
    **options: Any,
) -> None:
    """Train `steps` steps, resume from snapshots in between, and compare the ends bit for bit.

    Every attempt runs in a new process forked from this one, so that no global state is passed on. Epochs are limited
    to half of the steps, and validations to two batches, so that some snapshots are taken at the end of an epoch or
    in the middle of a validation.

    Args:
        module: the module, of which a copy trains, or a function that makes it.
        data: a DataModule or a training DataLoader, or a function that makes one; None if the module has the loaders.
        steps: number of steps to train.
        in_new_interpreter: resume once in a new interpreter, which hashes strings differently and lists folders in
            reverse. Module, data and options must be picklable.
        options: for the Trainer, such as `accumulate_grad_batches=2` or `callbacks=[...]`.

    Raises:
        AssertionError: it names what differs and, where it can be found, why.
    """
    __tracebackhide__ = True
    importlib.import_module("torch._dynamo")  # the first optimizer would, in each attempt anew: seconds
    short = {"limit_train_batches": max(2, steps // 2), "limit_val_batches": 2}
    keep = {"every_steps": 1, "keep": 1000 + 10 * steps}
    arguments = {"max_steps": steps, "enable_progress_bar": False, "snapshots": keep, **short, **options}
    with tempfile.TemporaryDirectory(prefix="midstride-check-") as folder:
        whole = ChildRun(Path(folder, "undisturbed")).train(module, data, arguments)
        cuts = _cuts(SnapshotCatalog(Store.open(whole.run)).snapshots())
        attempts = [*((cut, False) for cut in cuts), *([(cuts[0], True)] if in_new_interpreter else [])]
        for number, (cut, is_new) in enumerate(attempts):
            attempt = _resume_from(whole, cut, Path(folder, str(number)))
            resumed = attempt.train(module, data, arguments, in_new_interpreter=is_new)
            if not (faults := _compare(whole, resumed, has_order=not is_new)):
                continue
            again = ChildRun(Path(folder, "again")).train(module, data, arguments, watched=True)
            raise AssertionError(_message(faults, cut, whole, resumed, again, _NEW_INTERPRETER if is_new else ""))


def _cuts(snapshots: Sequence[Snapshot]) -> list[Snapshot]:
    """Return some snapshots: the first, one inside a validation, and others evenly spread."""
    before = snapshots[:-1]
    inside = [one for one in before if one.manifest["facts"]["progress"]["validating"]][:1]
    count = min(len(before), CUTS - len(inside))
    spread = [before[position * len(before) // count] for position in range(count)]
    return sorted({one.name: one for one in (*spread, *inside)}.values(), key=lambda one: one.name)


def _resume_from(whole: ChildRun, cut: Snapshot, folder: Path) -> ChildRun:
    """Return an attempt in `folder` with a copy of the run that ends at the snapshot `cut`."""
    shutil.copytree(Path(whole.run), folder / "run")
    for path in (folder / "run" / "snapshots").iterdir():
        if path.name > cut.name:
            shutil.rmtree(path)
    return ChildRun(folder)


def _compare(whole: ChildRun, resumed: ChildRun, *, has_order: bool = True) -> list[str]:
    """Return lines on a resumed attempt's differences in batches, final state, or metrics.

    The order of items in a set counts only if both attempts hash strings in the same way: with `has_order`.
    """
    faults = [fault] if (fault := first_difference(whole.journal, resumed.journal)) else []
    for expected, found in zip(final_state(whole.run), final_state(resumed.run), strict=True):
        for tree in () if has_order else (expected, found):
            _sort_sets(tree)
        changes = iter_differences(expected, found)
        faults += [_line(*difference) for difference in changes if not _OF_A_STREAM.match(difference[0])]
    rows = [Path(attempt.run, "metrics.csv").read_text().splitlines() for attempt in (whole, resumed)]
    if not faults and rows[0] != rows[1]:
        faults += [f"the metric log: {b!r} resumed, {a!r} undisturbed" for a, b in zip(*rows, strict=False) if a != b]
    return faults


def _sort_sets(tree: Any) -> None:
    """Sort the items of the sets in a state tree."""
    for _, one in instances_in(tree, "set"):
        one.state.pop("table", None)
        for items in one.state.values():
            items.sort(key=repr)


def _line(path: str, undisturbed: str, resumed: str) -> str:
    name, _, rest = path.partition("/")
    names = {"buffers": "module", "generators": "the main generator"}
    if name == "objects":
        name, _, rest = rest.partition("/")
    where = ".".join([names.get(name, name), *filter(None, rest.split("/"))])
    return f"{where}: {resumed} resumed, {undisturbed} undisturbed" if resumed != undisturbed else f"{where} differs"


def _message(faults: list[str], cut: Snapshot, whole: ChildRun, resumed: ChildRun, again: ChildRun, where: str) -> str:
    progress = cut.manifest["facts"]["progress"]
    position = f"batch {progress['val_batch']} of a validation" if progress["validating"] else "a step"
    result, undisturbed = resumed.result(), whole.result()
    hidden = [line for line in differing_lines(undisturbed["digest"], result["digest"]) if line not in faults]
    repeats = not (first_difference(whole.journal, again.journal) or _compare(whole, again))
    head = f"resumed after step {cut.position.step} (at {position}){where}, the run ends differently"
    head += ":" if repeats else " (also when it is repeated without an interruption):"
    sections = [
        (head, faults),
        ("Different, and in no snapshot:", hidden),
        ("Not repeatable, and called in your code:", again.result()["nondeterministic calls"]),
        ("The engine warned:", undisturbed["warnings"]),
    ]
    return "\n".join("\n  ".join([title, *_few(lines)]) for title, lines in sections if lines)


def _few(lines: Sequence[str]) -> list[str]:
    return [*lines[:SHOWN], *([f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else [])]
