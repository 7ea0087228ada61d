"""Writes `docs/faults.md` from the table: `cd tests && python -m faults.document`."""

from pathlib import Path

from faults.table import CODES, ROWS

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"

HEAD = """# Faults

```sh
midstride fit job.yaml --run first
```

This command resumes a run after each fault below. Tests strike a run of two processes, in a folder or on S3, and
compare all bits with the undisturbed run's (`tests/faults/table.py`). [Exit
codes](exact-resume.md#how-a-run-ends) have a table.

"""


def text() -> str:
    """Return the page."""
    lines = ["| fault | result | exit code |", "|---|---|---|"]
    lines += [f"| {row.fault} | {row.then} | {CODES[row.code]} |" for row in ROWS]
    return "\n".join([HEAD.rstrip(), "", *lines, ""])


if __name__ == "__main__":
    PAGE.write_text(text())
