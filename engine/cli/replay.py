"""`midstride replay`: compute a step of a run again, show it, compare it with the run."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console

from midstride.engine.cli.output import AsJson, busy, print_json, show_error
from midstride.engine.cli.stop_signals import stoppable
from midstride.engine.cli.table import escape, show_table, table_console
from midstride.engine.errors import UserError
from midstride.engine.formatting import format_number, printable
from midstride.engine.runs.replay import Launch, Replayed, ensure_exists, replay_run
from midstride.engine.runs.run import Run, job_of, run_at
from midstride.engine.session.outcome import Outcome
from midstride.engine.session.replay_plan import ReplayPlan
from midstride.engine.snapshots.catalog import SnapshotCatalog
from midstride.engine.snapshots.forks import snapshot_before
from midstride.engine.snapshots.parent import open_run
from midstride.engine.storage.store import Store
from midstride.engine.storage.urls import absolute_url

__all__ = ["is_of_loop", "job_run", "launch_quietly", "replay", "show_causes"]

RunUrl = Annotated[str, Parameter(help="A run of a job: a folder or an fsspec URL. It can be training.")]
Step = Annotated[int, Parameter(help="Number of the step, from 1.")]
Probe = Annotated[
    str, Parameter(help="file.py:function to call with trainer, module and batch before the step, in each process.")
]
Debug = Annotated[bool, Parameter(name="--pdb", help="Open the debugger before the step; one process.", negative=())]
Anomaly = Annotated[bool, Parameter(help="Stop at the first value that is not finite.", negative=())]
FromStart = Annotated[bool, Parameter(help="Start at step 1 if no snapshot before the step is kept.", negative=())]
Anyway = Annotated[bool, Parameter(help="Replay also with other versions or code than the run's.", negative=())]

_MOST_LAYERS, _MOST_SAMPLES = 40, 64
#: characters of the longest bar
_BAR = 12


def replay(
    url: RunUrl,
    /,
    *,
    step: Step,
    probe: Probe = "",
    debug: Debug = False,
    anomaly: Anomaly = False,
    from_start: FromStart = False,
    anyway: Anyway = False,
    as_json: AsJson = False,
) -> int:
    """Compute a step of a run again and show it; end with 1 if it differs from the run."""
    run = job_run(url, step)
    ensure_exists(run, step)
    snapshot = None if from_start else snapshot_before(run.store, step)
    place = f"{Path(probe.rpartition(':')[0]).absolute()}:{probe.rpartition(':')[2]}" if probe else ""
    plan = ReplayPlan("", step, place, debug, anomaly)
    if debug and run.job.world.ranks > 1:
        raise UserError(
            f"--pdb: {run.url} has {run.job.world.ranks} processes, but a debugger can attach to only one. Use --probe"
        )
    with stoppable():
        launch = _train_here if debug else launch_quietly(run, print if probe else None)
        found = replay_run(run.url, snapshot, plan, launch, anyway=anyway)
    if as_json:
        print_json(asdict(found))
    else:
        _show(found, step)
    return 1 if found.difference or found.error else 0


def job_run(url: str, step: int | None = None) -> Run:
    """Return the run at `url`; refuse a script's, with a way to compute it or its `step` again."""
    store = open_run(absolute_url(url))
    with store.errors_explained("read"):
        if job_of(store) is None and store.list("lease"):
            is_loop = is_of_loop(store)
            way = f"Train it by a job{' with script: train.py' if is_loop else ''}, whose steps can be computed again"
            if step is not None and not is_loop:
                way = f'In the script: with trainer.replay(module, data, run="{store.url}", step={step}) as at: ...'
            raise UserError(f"a script trains {url}, which cannot be started from here. {way}")
    return run_at(url)


def is_of_loop(store: Store) -> bool:
    """Return whether a script's own loop trains the run in `store`, not a Trainer."""
    newest = SnapshotCatalog(store).newest_readable()
    identity = newest.manifest["facts"].get("identity", {}) if newest else {}
    return str(identity.get("strategy")).startswith("own loop")


def launch_quietly(run: Run, on_line: Callable[[str], object] | None) -> Launch:
    """Return a function that trains a run in its own processes; `on_line` gets their output."""
    from midstride.engine.launch.job_fork_server import job_fork_server
    from midstride.engine.launch.launch import launch

    def start(fork: Run) -> Outcome:
        with busy(f"replaying {run.url}"), job_fork_server(fork.job):
            return launch(fork, on_line=on_line or (lambda _: None))

    return start


def _train_here(run: Run) -> Outcome:
    """Train a run in this process, as a debugger needs it."""
    from midstride.engine.launch.rank import build_all

    try:
        module, data, trainer = build_all(run)
        trainer.fit(module, data, run=run.url, take_over=True)
    except Exception as error:
        return Outcome.of(error)
    return Outcome("done")


def _show(found: Replayed, step: int) -> None:
    origin = f"snapshot {found.snapshot}" if found.snapshot else "the start"
    if found.error:
        show_error(found.error)
    if found.last >= found.first:
        steps = f"step {found.first}" if found.first == found.last else f"steps {found.first} to {found.last}"
        print(printable(f"replayed {steps} of {found.url} from {origin}: {_verdict(found)}"))
    for name, reason in found.damaged.items():
        print(printable(f"  snapshot {name} is damaged: {reason}"))
    if found.difference:
        show_causes(found.changed)
    if found.page:
        _show_page(found.page, step)


def show_causes(changed: Sequence[str]) -> None:
    """Print what has `changed` since a run that differs; if nothing has, what to do."""
    same = "versions, hardware and code are those of the run, so its data have changed, or a step is not repeatable"
    for line in [f"since the run: {one}" for one in changed] or [f"{same}: midstride check JOB --determinism"]:
        print(printable(f"  {line}"))


def _verdict(found: Replayed) -> str:
    if found.difference:
        return f"different from the run. First at {found.difference}"
    rows = found.last - found.first + 1
    if found.compared < rows:
        return f"equal, as far as logged; {rows - found.compared} of {rows} rows are not in the run's snapshots yet"
    return "all rows equal"


def _show_page(page: dict[str, Any], step: int) -> None:
    """Print position, losses, learning rates, samples and the norms of each layer."""
    console = table_console()
    console.print(f"\n[bold]step {step}[/]: epoch {page['epoch']}, batch {page['batch']}", highlight=False)
    losses = [("loss", _cells(found))] if (found := page.get("losses")) else []
    values = {**page.get("logged", {}), **page["learning_rates"]}
    lines = [*losses, *((name, format_number(value)) for name, value in values.items())]
    for everyone in page["samples"]:
        for rank, indices in enumerate(everyone):
            shown = ", ".join(map(str, (indices or [])[:_MOST_SAMPLES]))
            more = " ..." if indices and len(indices) > _MOST_SAMPLES else ""
            lines.append((f"samples of rank {rank}", f"{shown}{more}" if indices else "not known by index"))
    for name, value in lines:
        console.print(f"  {name}  {value}", highlight=False, markup=False, soft_wrap=True)
    steps = page.get("steps", ())
    if len(steps) > 1 and any(one.get("losses") or "gradient" in one for one in steps):
        _show_steps(console, steps)
    if largest := page.get("largest"):
        rows = [[str(one["sample"]), str(one["rank"]), format_number(one["loss"])] for one in largest]
        show_table(console, "largest losses", ("sample", "rank", "loss in eval mode"), rows, texts=())
    layers = sorted(page.get("layers", {}).items(), key=lambda one: -one[1].get("gradient", 0.0))[:_MOST_LAYERS]
    rows = [[escape(name), _cell(norms.get("weight")), _cell(norms.get("gradient"))] for name, norms in layers]
    if rows:
        show_table(console, "norms, largest gradients first", ("layer", "weights", "gradients"), rows, texts=("layer",))


def _show_steps(console: Console, steps: Sequence[Mapping[str, Any]]) -> None:
    """Print losses and gradient norms of steps, with a bar for each mean loss and each norm."""
    mark = "█" if console.encoding.startswith("utf") else "#"
    losses = [fmean(one["losses"]) if one.get("losses") else None for one in steps]
    norms = [one.get("gradient") for one in steps]
    rows = [
        [str(one["step"]), _cells(one.get("losses", ())), loss_bar, _cell(norm), norm_bar]
        for one, loss_bar, norm, norm_bar in zip(steps, _bars(losses, mark), norms, _bars(norms, mark), strict=True)
    ]
    columns = ("step", "loss", " ", "gradient norm", "  ")
    show_table(console, "the steps up to it", columns, rows, texts=(" ", "  "))


def _bars(values: Sequence[float | None], mark: str) -> list[str]:
    """Return a bar of marks for each value, as long as its share of the largest one.

    >>> _bars([1.0, None, 2.0, float("nan")], "#")
    ['######', '', '############', '']
    """
    known = [abs(value) for value in values if value is not None and isfinite(value)]
    largest = max(known, default=0.0) or 1.0
    shares = (abs(value) / largest if value is not None and isfinite(value) else 0.0 for value in values)
    return [mark * round(share * _BAR) for share in shares]


def _cells(losses: Iterable[float]) -> str:
    return ", ".join(map(format_number, losses))


def _cell(norm: float | None) -> str:
    return "" if norm is None else format_number(norm)
