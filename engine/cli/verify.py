"""`midstride verify`: compute a run again between kept snapshots, and compare the state."""

from dataclasses import asdict
from typing import Annotated

from cyclopts import Parameter

from midstride.engine.cli.output import AsJson, print_json, show_error
from midstride.engine.cli.replay import job_run, launch_quietly, show_causes
from midstride.engine.cli.stop_signals import stoppable
from midstride.engine.formatting import printable

__all__ = ["verify"]

RunUrl = Annotated[str, Parameter(help="A run of a job: a folder or an fsspec URL. It can be training.")]
First = Annotated[
    int | None, Parameter(name="--from", help="Step of the snapshot to start from; by default the oldest kept.")
]
Last = Annotated[int | None, Parameter(name="--to", help="Step of the last snapshot; by default the newest.")]


def verify(url: RunUrl, /, *, first: First = None, last: Last = None, as_json: AsJson = False) -> int:
    """Compute a run again between its kept snapshots; end with 1 if a part of the state differs."""
    run = job_run(url)
    from midstride.engine.runs.recomputed_states import verify_run  # with torch, which takes seconds

    with stoppable():
        found = verify_run(run.url, first, last, launch_quietly(run, None))
    if as_json:
        print_json(asdict(found))
    elif found.error:
        show_error(found.error)
    elif found.difference:
        print(printable(f"{found.url} differs. First at {found.difference}"))
        if found.row:
            print(printable(f"first row: {found.row}"))
        show_causes(found.changed)
    if found.equal and not as_json:
        steps = ", ".join(dict.fromkeys(map(str, found.equal)))
        print(printable(f"computed from step {found.start}: the whole state is equal at step {steps}"))
    return 1 if found.difference or found.error else 0
