"""Prefect task: what a night came to, as an artifact."""

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from midstride.engine.registry.comparison import PromotionDecision
from midstride.engine.registry.nightly import NightlyRun
from midstride.engine.registry.report import NightlyReport, nightly_markdown, nightly_report
from midstride.tasks.resources import artifact_key

__all__ = ["publish_nightly_report"]


@task(name="publish night", task_run_name="publish night", cache_policy=NO_CACHE)
def publish_nightly_report(night: NightlyRun, decision: PromotionDecision | None = None) -> NightlyReport:
    """Show challenger and champion side by side, and the champion now; return the same."""
    report = nightly_report(night, decision)
    title = f"{report.job}, night of {report.date}: {report.verdict}"
    create_markdown_artifact(nightly_markdown(report), key=artifact_key(night.url, "night"), description=title)
    return report
