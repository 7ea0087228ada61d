"""Writes `docs/faults.md` from the table: `cd tests && python -m faults.document`."""

from pathlib import Path

from faults.table import CODES, ROWS

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"

HEAD = """# Faults

```sh
midstride fit job.yaml --run first
```

This command resumes a run after each fault below. Tests strike a run of two processes with each, in a folder or on S3,
at the moments of `tests/faults/table.py`, which generates this page. Weights, optimizer, metric log and order of
samples must equal those of the undisturbed run, bit for bit. [Exit codes](exact-resume.md#how-a-run-ends) have a table.

"""


def text() -> str:
    """Return the page."""
    lines = ["| fault | result | exit code |", "|---|---|---|"]
    lines += [f"| {row.fault} | {row.then} | {CODES[row.code]} |" for row in ROWS]
    return "\n".join([HEAD.rstrip(), "", *lines, ""])


if __name__ == "__main__":
    PAGE.write_text(text())
