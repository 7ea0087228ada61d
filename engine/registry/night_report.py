"""Report of a night: decision and reasons."""

from pydantic import Field

from midstride.engine.config.options import Record
from midstride.engine.formatting import format_number, markdown_table
from midstride.engine.registry.comparison import PromotionDecision
from midstride.engine.registry.nightly import NightlyRun

__all__ = ["NightlyReport", "nightly_markdown", "nightly_report"]


class NightlyReport(Record):
    """Report of a night."""

    job: str
    date: str
    run: str
    url: str
    decision: PromotionDecision | None = Field(None, description="None without new data.")
    champion: str = Field("", description="The current champion's run.")
    weights: str = Field("", description="Folder of its weights.")

    @property
    def in_charge(self) -> bool:
        """True if the night's run is the champion now, neither rolled back nor followed."""
        return self.champion == self.run

    @property
    def verdict(self) -> str:
        """The result in a line."""
        if self.decision is None:
            return f"nothing new to train on; {self.champion or 'no run'} stays champion"
        if self.decision.promoted:
            since = "" if self.in_charge else f". By now {self.champion or 'no run'} is champion"
            return f"{self.run} was promoted: {self.decision.why}{since}"
        kept = f". {self.run} fails a gate and is kept" if self.decision.failed_gates else ""
        return f"{self.champion or 'no run'} stays champion{kept}: {self.decision.why}"


def nightly_report(night: NightlyRun, decision: PromotionDecision | None) -> NightlyReport:
    """Return the report of `night`, with the champion as of now."""
    champion = night.registry.current()
    return NightlyReport(
        job=night.job.name,
        date=night.date,
        run=night.run.name,
        url=night.url,
        decision=decision,
        champion=champion.run if champion else "",
        weights=night.registry.weights_url(champion) if champion else "",
    )


def nightly_markdown(report: NightlyReport) -> str:
    """Return `report` in Markdown: the decision first, then every value of both."""
    paragraphs = [f"# {report.job}: night of {report.date}", f"**{report.verdict}**"]
    if decision := report.decision:
        paragraphs.append(_values(decision))
        better = "larger" if decision.mode == "max" else "smaller"
        paragraphs.append(
            f"{decision.metric} decides; {better} is better, by more than {format_number(decision.margin)}."
        )
        if decision.gates:
            paragraphs.append("\n".join(["Gates:", "", *(f"- {words}" for words in decision.gates)]))
    if report.champion:
        paragraphs.append(f"Champion: {report.champion}, its weights: `{report.weights}`")
    return "\n\n".join(paragraphs) + "\n"


def _values(decision: PromotionDecision) -> str:
    names = sorted({*decision.challenger, *decision.champion})
    rows = [(name, *(_value(values, name) for values in (decision.challenger, decision.champion))) for name in names]
    return markdown_table(["test", "challenger", "champion"], rows)


def _value(values: dict[str, float], name: str) -> str:
    return format_number(values[name]) if name in values else ""
