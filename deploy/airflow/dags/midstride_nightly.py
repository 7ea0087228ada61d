"""A DAG that trains a job every night and promotes the result if it is better. See docs/airflow.md."""

import os
from datetime import datetime, timedelta
from typing import Any

from airflow.sdk import DAG, AssetAlias
from midstride_airflow.operators import (
    MidstrideCompareOperator,
    MidstrideEvaluateOperator,
    MidstrideFitOperator,
    MidstridePrepareOperator,
)

RUN = "nightly-{{ ds }}"
ALL: dict[str, Any] = {
    "job": os.environ["MIDSTRIDE_JOB"],
    "overrides": [key.replace("{date}", "{{ ds }}") for key in os.environ.get("MIDSTRIDE_SET", "").split()],
    "command": os.environ.get("MIDSTRIDE", "midstride"),
    "retries": int(os.environ.get("MIDSTRIDE_RETRIES", "10")),
    "retry_delay": timedelta(seconds=float(os.environ.get("MIDSTRIDE_RETRY_DELAY_S", "30"))),
}

with DAG(
    "midstride_nightly",
    schedule="0 2 * * *",
    start_date=datetime(2026, 1, 1),
    catchup=False,
    max_active_runs=1,  # nights do not overlap
):
    prepare = MidstridePrepareOperator(task_id="prepare", **ALL)
    fit = MidstrideFitOperator(task_id="fit", run=RUN, **ALL)
    evaluate = MidstrideEvaluateOperator(task_id="evaluate", run=RUN, **ALL)
    compare = MidstrideCompareOperator(task_id="compare", run=RUN, outlets=[AssetAlias("midstride_champion")], **ALL)
    prepare >> fit >> evaluate >> compare
