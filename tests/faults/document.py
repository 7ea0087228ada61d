"""Writes `docs/faults.md` from the table: `cd tests && python -m faults.document`."""

from pathlib import Path

from faults.table import CODES, ROWS

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"

HEAD = """# Faults

```sh
midstride fit job.yaml --run first
```

This command resumes a run after each fault below. Each row is a test: a fault strikes a run of two processes, and the
run is restarted if needed. Weights, optimizer, metric log and order of samples must equal those of the undisturbed run,
bit for bit. The page is generated from `tests/faults/table.py`.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | a retry may help |
| 2 | a retry cannot help |
| 75 | stopped on request; a retry resumes |

"""


def text() -> str:
    """Return the page."""
    lines = ["| fault | result | exit code | tested |", "|---|---|---|---|"]
    for row in ROWS:
        tried = ", ".join(dict.fromkeys(f"{cell.name} ({cell.store})" for cell in row.cells))
        lines.append(f"| {row.fault} | {row.then} | {CODES[row.code]} | {tried} |")
    return "\n".join([HEAD.rstrip(), "", *lines, ""])


if __name__ == "__main__":
    PAGE.write_text(text())
