"""`midstride diff`: the first difference of two runs, and its cause."""

from dataclasses import asdict
from typing import Annotated, Any

from cyclopts import Parameter

from midstride.engine.cli.output import AsJson, print_json
from midstride.engine.cli.replay import launch_quietly
from midstride.engine.cli.stop_signals import stoppable
from midstride.engine.errors import UserError
from midstride.engine.formatting import printable
from midstride.engine.runs.run import check_there
from midstride.engine.snapshots.parent import open_run
from midstride.engine.storage.urls import absolute_url

__all__ = ["diff"]

RunUrl = Annotated[str, Parameter(help="A run: a folder or an fsspec URL.")]


def diff(a: RunUrl, b: RunUrl, /, *, as_json: AsJson = False) -> int:
    """Name the first step at which two runs differ, and its cause; end with 1 if they differ."""
    urls = absolute_url(a), absolute_url(b)
    for url in urls:
        store = open_run(url)
        with store.errors_explained("read"):
            check_there(store)
            if not (store.list("lease") or store.list("snapshots")):
                raise UserError(f"{url} was never trained: there is nothing to compare")
    from midstride.engine.runs.run_difference import run_difference  # with torch, which takes seconds

    with stoppable():
        found = run_difference(urls, lambda run: launch_quietly(run, None))
    if as_json:
        print_json({**asdict(found), "is_equal": found.is_equal})
        return 0 if found.is_equal else 1
    whole = "every common snapshot" if not found.damaged else "every common snapshot that is whole"
    up_to, further = "", ""
    if found.last[0] != found.last[1]:
        longer = urls[found.last[1] > found.last[0]]
        up_to, further = f" up to step {min(found.last)}", f"; {longer} continues to step {max(found.last)}"
    states = f" and {whole}" if not found.why_no_cause else ""
    equal = f"equal{up_to}: every row of the metric log{states}{further}"
    lines = [equal] if found.is_equal else _lines(found)
    uncompared = [*found.damaged, *([found.why_no_cause] if found.is_equal and found.why_no_cause else [])]
    lines += [f"not compared      {reason}" for reason in uncompared]
    print(printable("\n".join(lines)))
    return 0 if found.is_equal else 1


def _lines(found: Any) -> list[str]:
    first = f"first difference  {found.cause}" if found.cause else f"cause not found   {found.why_no_cause}"
    lines = [first]
    if found.row:
        row = found.row
        lines.append(
            f"first row         step {row.step}, {row.name}: {row.expected or 'nothing'}, {row.found or 'nothing'}"
        )
    if found.equal_step is not None:
        lines.append(f"equal snapshots   up to step {found.equal_step}")
    if found.state:
        lines.append(f"first snapshot    {found.state.text()}")
    lines += [f"setting           {key}: {ours}, {theirs}" for key, (ours, theirs) in found.settings.items()]
    return [*lines, *(f"changed           {line}" for line in found.changed)]
