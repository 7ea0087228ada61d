"""Prefect assets: data, weights and champions, with their origins.

A task names its assets when it succeeds: before that, only the job's own code knows where the data lie. Prefect then
emits `prefect.asset.materialization.succeeded` for each.
"""

import re

from prefect.assets import Asset, AssetProperties
from prefect.context import AssetContext
from pydantic import JsonValue
from pydantic_core import from_json, to_json

from midstride.engine.registry.comparison import PromotionDecision
from midstride.engine.registry.registry import Champion, ModelRegistry
from midstride.engine.runs.run import Run
from midstride.engine.snapshots.weights import facts_of, folder_to_test
from midstride.engine.storage.listing import FolderListing

__all__ = ["champion_materialized", "data_materialized", "weights_materialized"]


def data_materialized(data: FolderListing) -> None:
    """Name the data that this task has prepared; data without a folder are no asset."""
    for asset in _data(data):
        _materialized(asset, [], {"files": data["files"], "bytes": data["bytes"], "checksum": data["checksum"]})


def weights_materialized(run: Run, data: FolderListing | None) -> None:
    """Name the weights that this task has trained, the best or else the last.

    Args:
        run: that made them.
        data: on which; unknown if empty.

    Raises:
        SnapshotError: the store cannot be read.
    """
    with run.store.errors_explained("read"):
        folder = folder_to_test(run.store)
        facts = facts_of(run.store, folder)
    if facts:
        metadata = {"run": run.name, "step": facts["step"], "metrics": facts["metrics"]}
        _materialized(_weights(run, folder), _data(data), metadata)


def champion_materialized(
    run: Run, folder: str, data: FolderListing | None, champion: Champion, decision: PromotionDecision
) -> None:
    """Name the champion that this task has promoted.

    Args:
        run: whose weights it has.
        folder: of these weights in the run, "best" or "last".
        data: on which it was trained and tested; unknown if empty.
        champion: the champion.
        decision: why it was promoted.
    """
    registry = ModelRegistry.of(run.job)
    metric, value = decision.metric, decision.challenger[decision.metric]
    metadata: dict[str, JsonValue] = {"run": run.name, "number": champion.number, "metric": metric, "value": value}
    metadata |= {"why": decision.why, "weights": registry.weights_url(champion)}
    _materialized(_asset(registry.url, f"{run.job.name}: champion"), [_weights(run, folder), *_data(data)], metadata)


def _weights(run: Run, folder: str) -> Asset:
    return _asset(f"{run.url}/{folder}", f"{run.job.name}: {folder} weights of {run.name}")


def _data(data: FolderListing | None) -> list[Asset]:
    return [_asset(data["folder"], "prepared data")] if data and data["folder"] else []


def _asset(url: str, name: str) -> Asset:
    """Return the asset at `url`, a path or URL.

    Prefect allows fewer characters in a key than a path can have.
    """
    key = url if "://" in url else f"file://{url}"
    return Asset(key=re.sub(r"[^\w:/.@=+~,;!$()*-]", "_", key), properties=AssetProperties(name=name))


def _materialized(asset: Asset, made_from: list[Asset], metadata: dict[str, JsonValue]) -> None:
    """Let Prefect emit `asset` when this task succeeds. Outside of tasks there are no assets."""
    context = AssetContext.get()
    if context is None:
        return
    context.downstream_assets.add(asset)
    context.direct_asset_dependencies.update(made_from)
    context.materialized_by = "midstride"
    context.add_asset_metadata(asset.key, from_json(to_json(metadata, inf_nan_mode="null")))  # JSON has no NaN
    context.update_tracked_assets()  # for the tasks that take the result of this one
