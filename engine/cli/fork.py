"""`midstride fork`: a new run that starts from a snapshot of another run, without a copy."""

import json
import shlex
from typing import Annotated

from cyclopts import Parameter

from midstride.engine.cli.output import AsJson, busy, print_json
from midstride.engine.cli.replay import is_of_loop
from midstride.engine.formatting import printable
from midstride.engine.runs.forked_job import OptimizerFrom, beside, fork_at
from midstride.engine.runs.run import check_there, job_of
from midstride.engine.snapshots.parent import open_run
from midstride.engine.storage.store import Store
from midstride.engine.storage.urls import absolute_url

__all__ = ["fork"]

RunUrl = Annotated[str, Parameter(help="The run to fork: a folder or an fsspec URL.")]
Step = Annotated[int | None, Parameter(help="Step of the snapshot to start from; by default the newest one.")]
NewRun = Annotated[str, Parameter(help="Name of the new run, beside the parent; or its folder or URL.", metavar="NAME")]
Changes = Annotated[
    list[str],
    Parameter(name="--set", help="Change a key of the job: module_args.lr=0.001", metavar="KEY=VALUE", negative=()),
]
From = Annotated[
    OptimizerFrom | None,
    Parameter(
        help="Source of the options of optimizers and schedulers; by default the job if module or callbacks change."
    ),
]
SkippedBatches = Annotated[
    list[str], Parameter(help="Steps of the parent whose batches are not trained on: 4810-4830", negative=())
]
SkippedSamples = Annotated[
    list[int], Parameter(help="Index of a training sample that is left out of its batches.", negative=())
]


def fork(
    url: RunUrl,
    /,
    *,
    run: NewRun,
    step: Step = None,
    changes: Changes | None = None,
    optimizer_from: From = None,
    skip_batches: SkippedBatches | None = None,
    skip_samples: SkippedSamples | None = None,
    as_json: AsJson = False,
) -> int:
    """Start a new run from a snapshot of another run, which does not change; nothing is copied."""
    skipped = {"skip_batches": skip_batches, "skip_samples": skip_samples}
    settings = [*(changes or ()), *(f"trainer.{key}={json.dumps(found)}" for key, found in skipped.items() if found)]
    with busy(f"looking at {url}"):
        source = open_run(absolute_url(url))
        target = Store.open(beside(source.url, run), source.options)
        with source.errors_explained("read"):
            check_there(source)
            parent, job = fork_at(source, target, step, settings, optimizer_from), job_of(source)
    if as_json:
        print_json({"url": target.url, "parent": source.url, "snapshot": parent.snapshot, "step": parent.step})
        return 0
    name = shlex.quote(target.url.rpartition("/")[2])
    command = f"midstride fit JOB --run {name}" if job else _call(source, target.url)
    print(printable(f"{target.url} is a fork of {source.url}, step {parent.step}; nothing was copied"))
    print(printable(f"train it: {command}"))
    return 0


def _call(source: Store, url: str) -> str:
    """Return the call by which a script trains a fork of its run."""
    return f'Loop("{url}")' if is_of_loop(source) else f'trainer.fit(module, data, run="{url}")'
