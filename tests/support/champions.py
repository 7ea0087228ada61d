"""Champions without training: runs that left weights, and were promoted."""

from midstride.engine.config.job import TrainingJob
from midstride.engine.registry.comparison import PromotionDecision
from midstride.engine.registry.registry import ModelRegistry
from midstride.engine.runs.run import Run
from midstride.engine.snapshots.committer import manifest_of
from midstride.engine.snapshots.lease import Lease
from midstride.engine.snapshots.position import Position
from midstride.engine.storage.checksums import digest_of, encode_document
from midstride.engine.storage.store import Store

#: where they lie in the folder of the run
WEIGHTS = "best/000000000001-g000001"


def keep_weights(job: TrainingJob, run: str) -> None:
    """Write weights into the folder `best` of a run, as far as a copy of them looks."""
    store, data = Store.open(f"{job.run_url(run)}/{WEIGHTS}"), f"weights of {run}".encode()
    files = {"model.safetensors": digest_of([data])}
    store.write("model.safetensors", data)
    store.write("manifest.json", encode_document(manifest_of(run, Lease(1, None), Position(1), 1, files, {})))


def promote(job: TrainingJob, run: str, over: int | None) -> None:
    keep_weights(job, run)
    decision = PromotionDecision(promoted=True, why="", metric="acc", mode="max", margin=0, challenger={}, over=over)
    ModelRegistry.of(job).promote(Run(job, run), "best", decision)
