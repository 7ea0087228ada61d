"""The champions of a job: the weights in use and their predecessors. No torch.

    <store>/_champions/<job>/000001.json       created exclusively: of two that are promoted at once one wins
    <store>/_champions/<job>/weights/<run>/    a copy of the run's weights: a champion outlives its run

The name of a run begins with a letter or a digit, so no run has the name of that folder. The champion with the highest
number is in use. A roll-back promotes the one before again; no file is ever overwritten.
"""

import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Any
from uuid import uuid4

from midstride.engine.config.job import TrainingJob
from midstride.engine.errors import Overtaken, SnapshotDamaged, SnapshotMissing, UserError
from midstride.engine.formatting import url_name
from midstride.engine.registry.comparison import PromotionDecision
from midstride.engine.runs.run import Run
from midstride.engine.snapshots.catalog import MANIFEST, copied_weights
from midstride.engine.snapshots.weights import download_tensors, newest_weights
from midstride.engine.state.bounds import damaged_on_error
from midstride.engine.storage.checksums import NUMBER, Kind, encode_document
from midstride.engine.storage.store import Store
from midstride.engine.storage.verification import read_required_document, read_verified

__all__ = ["FOLDER", "Champion", "ModelRegistry", "champion_weights_explained"]

log = logging.getLogger(__name__)

FOLDER = "_champions"
#: names as `_path` makes them
_NAME = re.compile(r"(\d{6}|[1-9]\d{6,17})\.json", re.ASCII)
#: the keys of a champion's file, and their types
_KINDS: dict[str, Kind] = {
    "number": int,
    "run": str,
    "module": str,
    "module_args": dict,
    "before": (int, NoneType),
    "time": NUMBER,
    "decision": (dict, NoneType),
}
#: way out if the file of a champion is damaged or missing
_WAYS_OUT = "restore it from a copy; or remove it if it has the highest number, which restores the previous champion"


@dataclass(frozen=True)
class Champion:
    """A promotion: from which run the weights of a job are taken.

    Args:
        number: from 1; the champion with the highest number is in use.
        run: name of the run that trained the weights.
        module: the module or script of the run, as its job names it.
        module_args: the module's arguments.
        before: number of the champion to which a roll-back returns.
        decision: why it was promoted; None if a roll-back brought it back.
        time: when it was promoted, in seconds since the epoch.
    """

    number: int
    run: str
    module: str
    module_args: dict[str, Any]
    before: int | None
    decision: PromotionDecision | None
    time: float


class ModelRegistry:
    """The champions of one job.

    Args:
        store: their folder.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    @classmethod
    def of(cls, job: TrainingJob) -> "ModelRegistry":
        """Return the champions of `job`, in its store."""
        return cls(Store.open(f"{job.store_url}/{FOLDER}/{job.name}", job.store_terms))

    @property
    def name(self) -> str:
        """The job's name."""
        return url_name(self._store.url)

    @property
    def url(self) -> str:
        """The folder of the champions."""
        return self._store.url

    def champions(self) -> list[Champion]:
        """Return all of them that can be read, oldest first; a warning names each of the others."""
        found = []
        for number in self._numbers():
            try:
                found.append(self.champion(number))
            except SnapshotDamaged as error:
                log.warning("champion %d of %s is left out: %s", number, self.name, error)
        return found

    def current(self) -> Champion | None:
        """Return the champion; None before the first."""
        numbers = self._numbers()
        return self.champion(numbers[-1]) if numbers else None

    def champion(self, number: int) -> Champion:
        """Return the champion called `number`.

        Raises:
            SnapshotDamaged: its file is missing or changed.
        """
        path = _path(number)
        found = read_required_document(self._store, path, _WAYS_OUT, **_KINDS)
        if found["number"] != number:
            where = f"{self._store.url}/{path}"
            raise SnapshotDamaged(f"{where} is the file of number {found['number']}: {_WAYS_OUT}")
        with damaged_on_error(f"{self._store.url}/{path}"):
            found["decision"] = found["decision"] and PromotionDecision.model_validate(found["decision"])
        return Champion(**{key: found[key] for key in _KINDS})

    def weights_url(self, champion: Champion) -> str:
        """Return the folder of its weights, for `load_from_checkpoint` and the like."""
        return f"{self._store.url}/weights/{champion.run}"

    def download_weights(self, champion: Champion, folder: Path) -> Path:
        """Write the weights of a champion into a local folder; return the path of the file.

        Raises:
            SnapshotMissing: they are gone.
        """
        if (saved := copied_weights(self._store, f"weights/{champion.run}")) is None:
            raise SnapshotMissing(f"no weights are in {self.weights_url(champion)}")
        return download_tensors(self._store, saved, folder / "weights.safetensors")

    def promoted(self, run: str) -> Champion | None:
        """Return the champion that a promotion of `run` made; None if it was never promoted."""
        found = [one for one in self.champions() if one.run == run and one.decision]
        return found[-1] if found else None

    def promote(self, run: Run, weights: str, decision: PromotionDecision) -> Champion:
        """Make `run` the champion, atomically.

        Args:
            run: of the same job.
            weights: which of its folders, "best" or "last".
            decision: why it is promoted, and the number of the champion that it replaces.

        Raises:
            Overtaken: another run was promoted since `decision` was made.
        """
        # First, so that a champion always has weights. If another run is promoted meanwhile, this copy stays unused.
        self._copy_weights(run.store, weights, run.name)
        return self._commit(
            Champion(
                number=(decision.over or 0) + 1,
                run=run.name,
                module=run.job.script or run.job.module,
                module_args=run.job.module_args,
                before=decision.over,
                decision=decision,
                time=time.time(),
            )
        )

    def roll_back(self) -> Champion:
        """Make the champion before this one champion again.

        Raises:
            UserError: there was none.
            Overtaken: another run was promoted meanwhile.
        """
        champion = self.current()
        if champion is None or champion.before is None:
            who = f"{champion.run} is the first champion" if champion else "there is no champion"
            raise UserError(f"{self.name}: {who}, so there is no earlier one to restore")
        back = self.champion(champion.before)
        return self._commit(replace(back, number=champion.number + 1, decision=None, time=time.time()))

    def _commit(self, champion: Champion) -> Champion:
        decision = champion.decision and champion.decision.model_dump()
        document = {**asdict(champion), "decision": decision, "nonce": uuid4().hex}
        data, path = encode_document(document), _path(champion.number)
        # A store can create the file, lose the answer, and refuse the second try: the file is ours.
        if self._store.create(path, data) or self._store.read(path) == data:
            return champion
        winner = self.champion(champion.number)
        raise Overtaken(
            f"{winner.run} became champion of {self.name} during the comparison of {champion.run} with the previous "
            "one. Nothing was changed: try again to compare with the new champion"
        )

    def _copy_weights(self, source: Store, folder: str, run: str) -> None:
        """Copy the weights in `folder` of a run's store to the champions, which outlive their runs."""
        if (saved := newest_weights(source, folder)) is None:
            raise SnapshotMissing(f"no weights were saved in {source.url}/{folder}")
        for name, expected in saved.manifest["files"].items():
            self._store.write(f"weights/{run}/{name}", read_verified(source, f"{saved.path}/{name}", expected))
        self._store.write(f"weights/{run}/{MANIFEST}", encode_document(saved.manifest))

    def _numbers(self) -> list[int]:
        return sorted(int(name.removesuffix(".json")) for name in self._store.list() if _NAME.fullmatch(name))


@contextmanager
def champion_weights_explained(url: str) -> Iterator[None]:
    """Add the way out to errors of the block about weights, if those at `url` are a champion's."""
    try:
        yield
    except (SnapshotMissing, SnapshotDamaged) as error:
        store, below, _ = url.partition(f"/{FOLDER}/")
        if not below:
            raise
        raise type(error)(
            f"{str(error).partition('. `midstride')[0]}. They are a champion's: restore them from a copy, or restore "
            f"the previous champion: `midstride champion rollback {store}`. A night that started from them by "
            "warm_start continues once its night.json is removed"
        ) from error


def _path(number: int) -> str:
    return f"{number:06d}.json"
