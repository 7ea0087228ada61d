"""Prefect assets of a training, read back from the server: what was made, from what, with which numbers."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from prefect import flow, task
from prefect.context import AssetContext
from support.flow_events import told
from support.flow_runs import STEPS

from midstride.engine.config.job import TrainingJob
from midstride.engine.registry.comparison import PromotionDecision
from midstride.engine.runs.run import Run
from midstride.flows import train
from midstride.tasks import compare_and_promote, launch_world, prepare_data
from midstride.tasks.assets import data_materialized

Make = Callable[..., TrainingJob]
MADE = "prefect.asset.materialization.succeeded"


def made_from(event: dict[str, Any]) -> set[str]:
    return {one["prefect.resource.id"] for one in event["related"] if one["prefect.resource.role"] == "asset"}


def test_data_weights_and_champion_are_assets(make_job: Make, server: str) -> None:
    job = make_job(processes=1)

    @task
    def serve(decision: PromotionDecision) -> set[str]:
        context = AssetContext.get()
        return {asset.key for asset in context.upstream_assets} if context else set()

    @flow
    def pipeline() -> set[str]:
        data = prepare_data(job)
        launch_world(job, "first", data)
        return serve.submit(compare_and_promote(job, "first", data)).result()

    data, weights = f"file://{job.data_args['folder']}", f"file://{job.run_url('first')}/best"
    champion = f"file://{job.store_url}/_champions/tiny"
    assert pipeline() == {champion}, "a task that takes the decision is made from the champion"

    [prepared] = told(server, data, MADE)
    assert (prepared["payload"]["files"], made_from(prepared)) == (1, set())
    [trained] = told(server, weights, MADE)
    assert made_from(trained) == {data}
    assert trained["resource"]["prefect.resource.name"] == "tiny: best weights of first"
    assert set(trained["payload"]) == {"run", "step", "metrics"}
    assert (trained["payload"]["run"], trained["payload"]["step"]) == ("first", STEPS)
    assert "val/accuracy" in trained["payload"]["metrics"]
    [promoted] = told(server, champion, MADE)
    assert made_from(promoted) == {data, weights}
    assert (promoted["payload"]["run"], promoted["payload"]["metric"]) == ("first", "test/accuracy")
    assert "midstride" in [one["prefect.resource.id"] for one in promoted["related"]]


def test_the_flow_names_the_data_of_its_weights_and_a_done_run_is_done_again(make_job: Make, server: str) -> None:
    job = make_job(processes=1)
    first = train(job, "whole")
    [trained] = told(server, f"file://{job.run_url('whole')}/best", MADE)
    assert made_from(trained) == {f"file://{job.data_args['folder']}"}
    again = train(job, "whole")
    assert (again.outcome, again.steps, again.failures, again.test) == ("done", first.steps, (), first.test)
    assert Run(job, "whole").attempts.attempts()[-1].number == 1, "it is not trained again"
    told(server, f"file://{job.run_url('whole')}/best", MADE, least=2)


#: folder of data -> key of its asset: Prefect allows fewer characters
KEYS = {"/data/a b#c/ü%20": "file:///data/a_b_c/ü_20", "s3://bucket/a?b": "s3://bucket/a_b"}


@pytest.mark.parametrize("folder", KEYS)
def test_any_folder_of_data_can_be_an_asset(folder: str, server: str) -> None:
    @task
    def prepare() -> None:
        data_materialized({"folder": folder, "files": math.nan, "bytes": 1, "checksum": ""})

    flow(lambda: prepare(), name="prepares")()
    [prepared] = told(server, KEYS[folder], MADE)
    assert prepared["payload"] == {"files": None, "bytes": 1, "checksum": ""}, "JSON has no NaN"


def test_data_without_a_folder_are_no_asset() -> None:
    @task
    def prepare() -> set[Any]:
        data_materialized({"folder": None, "files": 0, "bytes": 0, "checksum": ""})
        context = AssetContext.get()
        assert context is not None
        return context.downstream_assets

    assert flow(lambda: prepare(), name="prepares")() == set()
