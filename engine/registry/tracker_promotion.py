"""Trackers that keep models hear which weights are in charge. Needs no torch."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from midstride.engine.config.loggers import LoggerOptions
from midstride.engine.loggers.base import LoggedRun, Logger
from midstride.engine.loggers.build_logger import build_logger
from midstride.engine.loggers.delivery import logged_run
from midstride.engine.registry.registry import Champion, ModelRegistry
from midstride.engine.storage.store import Store

__all__ = ["publish_champion"]


def publish_champion(
    registry: ModelRegistry, runs: Store, loggers: Sequence[LoggerOptions], folder: str = ""
) -> list[str]:
    """Promote the champion in each of `loggers`. Return a message for each failure.

    A repeated promotion does no harm: the next night repeats that of a killed one.

    Args:
        registry: whose champion.
        runs: the store of all runs.
        loggers: of the job.
        folder: of its code.
    """
    if (champion := registry.current()) is None:
        return []
    errors: list[str] = []
    with TemporaryDirectory(prefix="midstride-champion-") as temporary:
        weights: Path | None = None
        for options in loggers:
            try:
                logger = build_logger(options, folder=folder)
                if type(logger).promote is Logger.promote:
                    continue
                weights = weights or registry.download_weights(champion, Path(temporary))
                logger.promote(_run_of(runs, champion), weights)
            except Exception as error:
                cause = (str(error).splitlines() or [""])[0]
                errors.append(
                    f"{options.path} was not told that {champion.run} is champion of {registry.name}, "
                    f"the next night sends it: {type(error).__name__}: {cause}"
                )
    return errors


def _run_of(runs: Store, champion: Champion) -> LoggedRun:
    store = runs.at(champion.run)
    try:
        return logged_run(store)
    except FileNotFoundError:  # a champion outlives its run
        return LoggedRun(champion.run, store.url, "", {})
