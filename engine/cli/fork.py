"""`midstride fork`: a new run that starts from a snapshot of another run, without a copy."""

import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, get_args

from cyclopts import Parameter

from midstride.engine.cli.output import AsJson, busy, print_json
from midstride.engine.config.job import IdentityKey
from midstride.engine.config.options import SnapshotOptions
from midstride.engine.errors import UserError
from midstride.engine.formatting import printable
from midstride.engine.runs.run import Run, job_of, run_at
from midstride.engine.snapshots.forks import fork as make_fork
from midstride.engine.snapshots.forks import snapshot_at
from midstride.engine.snapshots.parent import open_run
from midstride.engine.storage.store import Store
from midstride.engine.storage.urls import absolute_url, url_fault

__all__ = ["fork"]

RunUrl = Annotated[str, Parameter(help="The run to fork: a folder or an fsspec URL.")]
Step = Annotated[int | None, Parameter(help="Step of the snapshot to start from; by default the newest one.")]
NewRun = Annotated[
    str, Parameter(help="Name of the new run, beside the other one; or its folder or URL.", metavar="NAME")
]
Changes = Annotated[
    list[str],
    Parameter(name="--set", help="Change a key of the job: module_args.lr=0.001", metavar="KEY=VALUE", negative=()),
]


def fork(
    url: RunUrl, /, *, run: NewRun, step: Step = None, changes: Changes | None = None, as_json: AsJson = False
) -> int:
    """Start a new run from a snapshot of another run, which does not change; nothing is copied."""
    settings = changes or []
    with busy(f"looking at {url}"):
        source = open_run(absolute_url(url))
        with source.errors_explained("read"):
            target = Store.open(_beside(source.url, run), source.options)
            forked = _forked_job(source, target, settings)
            snapshot = snapshot_at(source, step)
        with target.errors_explained("written"):
            parent = make_fork(source, snapshot, target, settings)
            if forked is not None:
                forked.save_job()
    name = target.url.rpartition("/")[2]
    command = _command(name, settings) if forked else f'trainer.fit(module, data, run="{target.url}")'
    if as_json:
        print_json({"url": target.url, "parent": source.url, "snapshot": snapshot.name, "step": parent.step})
        return 0
    print(printable(f"{target.url} is a fork of {source.url}, step {parent.step}; nothing was copied"))
    print(printable(f"train it: {command}"))
    return 0


def _beside(source: str, run: str) -> str:
    """Return the URL of `run`: a path or URL, or a name beside the run at `source`."""
    if fault := url_fault(run):
        raise UserError(f"--run: {fault}")
    return absolute_url(run.rstrip("/")) if "/" in run else f"{source.rpartition('/')[0]}/{run}"


def _forked_job(source: Store, target: Store, settings: Sequence[str]) -> Run | None:
    """Return the new run with its changed job; None for a script's run.

    Raises:
        UserError: a script trains the run, and there are settings to change.
        JobError: the name or a setting is wrong.
    """
    if job_of(source) is None:
        if settings:
            raise UserError(f"--set: a script trains {source.url}. Change the script; accept_change names what differs")
        return None
    job = run_at(source.url, settings).job
    runs, _, name = target.url.rpartition("/")
    snapshots = job.snapshots or SnapshotOptions.model_validate({})
    changed: dict[str, Any] = {
        "snapshots": snapshots.model_copy(update={"url": runs}),
        "accept_change": (*job.accept_change, *_accepted(settings)),
    }
    return Run(job.model_copy(update=changed), name)


def _accepted(settings: Iterable[str]) -> list[str]:
    """Return the keys of `--accept-change` for the parts of the identity that `settings` change.

    >>> _accepted(["trainer.max_epochs=20", "module_args.lr=0.001", "trainer.precision=bf16"])
    ['module_args', 'settings', 'precision']
    """

    def keys() -> Iterator[str]:
        for setting in settings:
            first, *rest = setting.partition("=")[0].split(".")
            yield rest[0] if first in ("trainer", "world") and rest else first
            if first in ("module", "module_args", "callbacks"):
                yield "settings"  # else the snapshot brings along those of the optimizers

    known = _identity_keys(IdentityKey)
    return [key for key in dict.fromkeys(keys()) if key in known]


def _identity_keys(kind: Any) -> set[str]:
    """Return the texts of a Literal, in which others may be nested."""
    return {key for one in get_args(kind) for key in ([one] if isinstance(one, str) else _identity_keys(one))}


def _command(name: str, settings: Sequence[str]) -> str:
    changes = [word for setting in settings for word in ("--set", setting)]
    accepted = [word for key in _accepted(settings) for word in ("--accept-change", key)]
    return f"midstride fit JOB {shlex.join(['--run', name, *changes, *accepted])}"
