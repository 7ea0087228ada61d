"""A run that fails, is resumed and comes to its end, and what it leaves behind, read with json alone."""

import json
import re
from pathlib import Path
from typing import Any

from midstride.engine import Store, TrainingJob
from midstride.engine.launch.launch import launch
from midstride.engine.registry.comparison import PromotionDecision
from midstride.engine.registry.registry import ModelRegistry
from midstride.engine.runs.run import Run
from midstride.engine.session.events import Event
from midstride.engine.session.session import Session
from midstride.engine.snapshots.catalog import SnapshotCatalog

#: by name, such as "manifest.json"
Documents = dict[str, Any]


def live(folder: Path) -> Documents:
    """Let a run in `folder` fail once and come to its end; return what was said meanwhile."""
    job = TrainingJob.model_validate(
        {
            "name": "golden",
            "folder": str(Path(__file__).parent),
            "module": "golden_model:Net",
            "module_args": {"mark": str(folder / "failed")},
            "data": "golden_model:Data",
            "monitor": {"metric": "val/error", "mode": "min", "patience": 5},
            "trainer": {"max_epochs": 2, "enable_progress_bar": False},
            "snapshots": {"url": str(folder), "every_steps": 2, "keep": 2},
        }
    )
    events: dict[str, set[str]] = {}

    def note(event: Event) -> None:
        events.setdefault(event.kind, set()).update(event.fields)

    outcomes = [launch(Run(job, "run"), on_event=note) for _ in range(2)]
    assert [(outcome.kind, outcome.code, outcome.type) for outcome in outcomes] == [
        ("user_error", 2, "midstride.engine.errors.UserCodeError"),
        ("done", 0, ""),
    ]
    history = SnapshotCatalog(Store.open(job.run_url("run")))
    history.set_aside(history.snapshots()[0].name, "damaged")
    decision = PromotionDecision(promoted=True, why="", metric="val/error", mode="min", margin=0, challenger={})
    ModelRegistry.of(job).promote(Run(job, "run"), "best", decision)
    session = Session.create(Run(job, "run").document(3))
    session.write_outcome(outcomes[1])
    said = {file.name: json.loads(file.read_text()) for file in session.folder.glob("*.json")}
    session.remove()
    return {**said, "events": events}


def documents_of(folder: Path) -> Documents:
    """Return what lies in the store `folder`, by kind of document; of several the newest."""
    documents: Documents = {}
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in paths:
        name = str(path.relative_to(folder))
        if path.suffix == ".json":
            documents[_kind_of(name)] = json.loads(path.read_text())
        elif path.parent.name == "run" and path.suffix == ".csv":
            documents[_kind_of(name)] = path.read_text().splitlines()[0].split(",")
        elif path.suffix == ".safetensors":
            documents[_kind_of(name)] = _header(path)
    documents["files"] = {_spelled(str(path.relative_to(folder))) for path in paths}
    return documents


def instances_in(node: Any) -> dict[str, str]:
    """Return the kind of each form of instance in a document."""
    if isinstance(node, list):
        return {form: kind for item in node for form, kind in instances_in(item).items()}
    if not isinstance(node, dict):
        return {}
    found = {form: kind for item in node.values() for form, kind in instances_in(item).items()}
    return {**found, node["form"]: node["kind"]} if node.get("$") == "instance" else found


def _kind_of(name: str) -> str:
    """Return the name by which tests know a file; of weights and of files called by a number, that of their folder."""
    path = Path(name)
    if path.parts[1] in ("best", "last"):
        return path.parts[1] if path.name == "manifest.json" else path.name
    return f"{path.parent.name}{path.suffix}" if path.name[0].isdigit() else path.name


def _spelled(name: str) -> str:
    """Return the name of a file without checksums."""
    return re.sub(r"(?<=[-.])(?:[0-9a-f]{32}|[0-9a-f]{8})(?=\.)", "CHECKSUM", name)


def _header(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    header: dict[str, Any] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return header
