"""Writes `docs/faults.md` from the table: `cd tests && python -m faults.document`."""

from pathlib import Path

from faults.table import CODES, ROWS

__all__ = ["PAGE", "text"]

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"

HEAD = """# Faults, and what happens in each

Every line of this table is a test: the fault is made to happen in a run of two processes, the run is started again
where that is needed, and its weights, its optimizer, its metric log and the order of its samples are compared, bit for
bit, with those of the same run undisturbed. This page is written from the table of those tests,
`tests/faults/table.py`.

A world ends with 0 done; 1 a retry may help; 2 a retry cannot help; 75 stopped on request, a retry resumes. A retry is
the same command again: a flow does it on its own, `midstride fit JOB --run NAME` when it is called again.

"""


def text() -> str:
    """Return the page."""
    lines = ["| fault | what happens | the world ends with | tried |", "|---|---|---|---|"]
    for row in ROWS:
        tried = ", ".join(dict.fromkeys(f"{cell.name} ({cell.store})" for cell in row.cells))
        lines.append(f"| {row.fault} | {row.then} | {CODES[row.code]} | {tried} |")
    said = [f"{row.fault}:\n\n    {row.says}\n" for row in ROWS if row.says]
    return "\n".join([HEAD.rstrip(), "", *lines, "", "## What a person reads", "", *said])


if __name__ == "__main__":
    PAGE.write_text(text())
