"""Writes `docs/faults.md` from the table: `cd tests && python -m faults.document`."""

from pathlib import Path

from faults.table import CODES, ROWS, Row

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"

HEAD = """# Faults

```sh
midstride fit job.yaml --run first
```

This command resumes a run after each fault below. Each row is a test: a fault strikes a run of two processes, in a
folder or on S3, and the run is restarted if needed. Weights, optimizer, metric log and order of samples must equal
those of the undisturbed run, bit for bit. [Exit codes](exact-resume.md#how-a-run-ends) have a table.
`tests/faults/table.py` generates this page.

"""


def text() -> str:
    """Return the page."""
    lines = ["| fault | result | exit code | tested |", "|---|---|---|---|"]
    for row in ROWS:
        lines.append(f"| {row.fault} | {row.then} | {CODES[row.code]} | {moments(row)} |")
    return "\n".join([HEAD.rstrip(), "", *lines, ""])


def moments(row: Row) -> str:
    """Return the moments of a fault, those on S3 last."""
    cells = sorted(row.cells, key=lambda cell: cell.store == "s3")
    return "; ".join(dict.fromkeys(f"{'S3: ' if cell.store == 's3' else ''}{cell.name}" for cell in cells))


if __name__ == "__main__":
    PAGE.write_text(text())
