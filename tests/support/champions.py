"""Champions without training: runs that left weights, and were promoted."""

from midstride.engine.config.job import TrainingJob
from midstride.engine.registry.comparison import PromotionDecision
from midstride.engine.registry.registry import ModelRegistry
from midstride.engine.runs.run import Run
from midstride.engine.storage.checksums import digest_of, encode_document
from midstride.engine.storage.store import Store


def keep_weights(job: TrainingJob, run: str) -> None:
    """Leave what a run leaves in its folder `best`, as far as a copy of it looks."""
    store, data = Store.open(f"{job.run_url(run)}/best"), f"weights of {run}".encode()
    store.write("weights.safetensors", data)
    store.write(
        "manifest.json",
        encode_document(
            {"files": {"weights.safetensors": digest_of([data])}, "metrics": {}, "facts": {}, "state_dict": {}}
        ),
    )


def promote(job: TrainingJob, run: str, over: int | None) -> None:
    keep_weights(job, run)
    decision = PromotionDecision(promoted=True, why="", metric="acc", mode="max", margin=0, challenger={}, over=over)
    ModelRegistry.of(job).promote(Run(job, run), "best", decision)
