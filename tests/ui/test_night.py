"""The page of a night: the decision first, then the values of both, and each gate."""

from ui.site import Site

from midstride.engine.config.options import GateOptions
from midstride.engine.registry.comparison import compare, with_gates
from midstride.engine.registry.night_report import NightlyReport, nightly_markdown

NEW, OLD = {"test/accuracy": 0.938, "test/recall": 0.81}, {"test/accuracy": 0.921, "test/recall": 0.86}


def test_the_page_of_a_night_explains_its_decision(site: Site) -> None:
    better = compare(NEW, OLD, metric="test/accuracy", mode="max", margin=0.005, over=3)
    decision = with_gates(better, {"test/accuracy": GateOptions(min=0.9), "test/recall": GateOptions(max_drop=0.02)})
    report = NightlyReport(
        job="digits",
        date="2026-03-04",
        run="digits-2026-03-04",
        url="runs/digits-2026-03-04",
        decision=decision,
        champion="digits-2026-03-01",
        weights="runs/digits-2026-03-01/best",
    )
    body = {"key": "night", "type": "markdown", "data": nightly_markdown(report), "description": report.verdict}
    with site.browser() as screen:
        screen.show_artifact(site.api.post("/artifacts/", body)["id"])
        for words in ("digits-2026-03-01 stays champion", "fails a gate and is kept", "max_drop 0.02", "0.86"):
            screen.sees(words)
        screen.picture("night", 720)
