"""Forks of the runs of jobs: each attempt of a fork has its changed settings. No torch."""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from midstride.engine.config.job import IDENTITY_KEYS, TrainingJob
from midstride.engine.config.options import SnapshotOptions
from midstride.engine.errors import UserError
from midstride.engine.runs.run import Run, job_of, run_at
from midstride.engine.runs.run_comparison import flat_settings
from midstride.engine.snapshots.catalog import SnapshotCatalog
from midstride.engine.snapshots.forks import fork, snapshot_at
from midstride.engine.snapshots.parent import Changes, ForkedStore, Parent, inherits, open_run, parent_of
from midstride.engine.storage.store import Store
from midstride.engine.storage.urls import absolute_url, url_fault

__all__ = ["OptimizerFrom", "as_forked", "beside", "fork_at", "make_fork"]

#: where a fork's options of optimizers and schedulers come from
OptimizerFrom = Literal["job", "snapshot"]

#: options of a job that decide nothing of the training
_OPERATION = {"accept_change", "folder", "loggers", "nightly", "resources", "retries_without_progress", "snapshots"}


def beside(source: str, run: str) -> str:
    """Return the URL of `run`: a path or URL, or a name beside the run at `source`.

    Raises:
        UserError: `run` is no name and no URL.
    """
    if fault := url_fault(run):
        raise UserError(f"{run}: {fault}")
    return absolute_url(run.rstrip("/")) if "/" in run else f"{source.rpartition('/')[0]}/{run}"


def fork_at(
    source: Store,
    target: Store,
    step: int | None = None,
    settings: Sequence[str] = (),
    optimizer_from: OptimizerFrom | None = None,
) -> Parent:
    """Make the run in `target` a fork of the one in `source`, with changed settings.

    Args:
        source: the parent, as `open_run` returns it.
        target: folder of the new run.
        step: of the snapshot to start from; by default the newest.
        settings: changes of the job, such as "trainer.max_epochs=20".
        optimizer_from: of changed options of optimizers and schedulers; by default the job if module or callbacks
            change, else the snapshot.

    Raises:
        UserError: a script trains the run, and there are settings to change; or `target` exists.
        JobError: a setting is wrong.
        SnapshotMissing: there is no such snapshot.
    """
    was = job_of(source)
    if was is None:
        if settings:
            raise UserError(f"--set: a script trains {source.url}. Change the script; accept_change names what differs")
        return fork(source, snapshot_at(source, step), target)
    runs, _, name = target.url.rpartition("/")
    before, after = (run_at(source.url, changes).job for changes in ((), settings))
    options = after.snapshots or SnapshotOptions.model_validate({})
    run = Run(after.model_copy(update={"snapshots": options.model_copy(update={"url": runs})}), name)
    keys = [setting.partition("=")[0].strip() for setting in settings]
    ours, theirs = (job.model_dump(mode="json") for job in (before, after))
    values = {key: (_at(ours, key), _at(theirs, key)) for key in keys}
    made = _added(source, Changes(tuple(settings), values, tuple(_accepted(keys, optimizer_from))))
    snapshot = snapshot_at(source, step)
    with target.errors_explained("written"):
        parent = fork(source, snapshot, target, made)
        as_forked(run).save_job()
    return parent


def make_fork(run: Run, of: str, step: int | None = None) -> None:
    """Make `run` a fork of another run, with the changes in its job, unless it is one already.

    Args:
        run: the new run.
        of: name of a run beside it, or a folder or URL.
        step: of the snapshot to start from; by default the newest.

    Raises:
        UserError: `run` is another run already.
        SnapshotMissing: there is no such snapshot.
    """
    source = open_run(beside(run.url, of), run.store.options)
    parent = parent_of(run.store)
    if parent is not None and parent.url_from(run.url) in _urls(source):
        return
    if (theirs := job_of(source)) is None:
        raise UserError(f"{source.url} is no run of a job: only such runs can be forked here")
    was, now = (dict(flat_settings(job.model_dump(mode="json", exclude=_OPERATION))) for job in (theirs, run.job))
    values = {key: (was.get(key), value) for key, value in now.items() if was.get(key) != value}
    settings = tuple(f"{key}={_text(value)}" for key, (_, value) in values.items())
    changes = _added(source, Changes(settings, values, tuple(_accepted(values, None))))
    with run.store.errors_explained("written"):
        fork(source, snapshot_at(source, step), run.store, changes)


def _urls(store: Store) -> Iterator[str]:
    """Yield the URL of a run, and those of the runs whose snapshots it inherits."""
    yield store.url
    while isinstance(store, ForkedStore):
        store = store.origin
        yield store.url


def _added(source: Store, changes: Changes) -> Changes:
    """Return `changes`, with those that the parent in `source`, itself a fork, was made with."""
    if (parent := parent_of(source)) is None:
        return changes
    earlier = parent.changes
    values = {key: (earlier.values.get(key, given)[0], given[1]) for key, given in changes.values.items()}
    accepted = dict.fromkeys((*earlier.accepted, *changes.accepted))
    return Changes(changes.settings, {**earlier.values, **values}, tuple(accepted))


def as_forked(run: Run) -> Run:
    """Return `run` with the changed settings of the fork that it is; itself if it is none.

    A setting holds where the job has the parent's value: what was changed since wins.
    """
    # Ranks read no YAML.
    from midstride.engine.config.yaml_file import apply_overrides

    fresh = Run(run.job, run.name)
    with fresh.store.errors_explained("read"):
        parent = parent_of(fresh.store)
        if parent is None or not (parent.changes.values or parent.changes.accepted):
            return fresh
        newest = SnapshotCatalog(fresh.store).newest_readable()
    document = run.job.model_dump(mode="json")
    held = {key: now for key, (was, now) in parent.changes.values.items() if _at(document, key) == was}
    apply_overrides(document, [f"{key}={_text(value)}" for key, value in held.items()])
    if newest is None or inherits(fresh.store, newest.path):  # its own snapshots have its identity
        document["accept_change"] = [*dict.fromkeys((*document["accept_change"], *parent.changes.accepted))]
    return Run(TrainingJob.model_validate(document), run.name)


def _text(value: Any) -> str:
    """Return a value as JSON, which is YAML."""
    return json.dumps(value, ensure_ascii=False)


def _at(document: Any, key: str) -> Any:
    """Return the value at a key path such as "trainer.max_epochs"; None if there is none."""
    for name in key.split("."):
        document = document.get(name) if isinstance(document, dict) else None
    return document


def _accepted(keys: Iterable[str], optimizer_from: OptimizerFrom | None) -> list[str]:
    """Return the parts of the identity that a change of `keys` of the job changes.

    >>> _accepted(["trainer.max_epochs", "module_args.lr", "trainer.precision"], None)
    ['module_args', 'settings', 'precision']
    >>> _accepted(["module_args.lr"], "snapshot")
    ['module_args']
    """

    def parts() -> Iterator[str]:
        if optimizer_from == "job":
            yield "settings"
        for key in keys:
            first, *rest = key.split(".")
            yield rest[0] if first in ("trainer", "world") and rest else first
            if first in ("module", "module_args", "callbacks") and optimizer_from is None:
                yield "settings"  # else the snapshot brings along those of the optimizers

    return [part for part in dict.fromkeys(parts()) if part in IDENTITY_KEYS]
