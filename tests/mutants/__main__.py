"""Plant each bug of the table in a copy of the checkout and run its tests: what survives, the tests do not see.

make mutants
make mutants ARGS="-k lease"
"""

import argparse
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from mutants.copy import Copy
from mutants.mutant import Checkout, Mutant
from mutants.table import MUTANTS

ROOT = Path(__file__).parents[2]
#: in memory, where there is such a folder: what tests write is synced
FOLDER = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
#: seconds that a test may take without a planted bug
CONTROL_S = 600.0
#: with one it may take so many times what its row's slowest took without, but not less than this: a hang is seen, too
TIMES, LEAST_S = 10.0, 60.0


def judge(copy: Copy, mutant: Mutant, limit_s: float) -> tuple[str, str]:
    """Return how a planted bug ended, in a word, and what there is to say of it."""
    with copy.planted(mutant):
        verdict = copy.tested(copy.checkout.tests_of(mutant), limit_s)
    if verdict.code == 1:
        by = verdict.failed[0].partition("::")[2] if verdict.failed else "a test"
        return ("KILLED", f"by {by}: the argument no longer holds") if mutant.survives else ("killed", f"by {by}")
    if verdict.code != 0:
        return "BROKEN", f"pytest ended with code {verdict.code}\n{verdict.output}"
    return ("argued", mutant.survives) if mutant.survives else ("SURVIVED", " ".join(mutant.tests))


def run(copy: Copy, rows: Sequence[Mutant], taken_s: Mapping[str, float]) -> bool:
    """Run all `rows`, print how each ended, and return whether all of them ended as they should.

    Args:
        copy: where they are planted.
        rows: planted bugs.
        taken_s: what each test took where there was none.
    """
    counts: Counter[str] = Counter()
    for mutant in rows:
        began = time.monotonic()
        slowest_s = max(s for test, s in taken_s.items() if test.startswith(tuple(copy.checkout.tests_of(mutant))))
        ended, told = judge(copy, mutant, max(LEAST_S, TIMES * slowest_s))
        counts[ended] += 1
        print(f"{ended:<9}{time.monotonic() - began:5.1f} s  {mutant}; {told}", flush=True)
    print(", ".join(f"{count} {ended}" for ended, count in counts.items()))
    return not counts.keys() - {"killed", "argued"}


def main() -> int:
    """Run the rows that were asked for; 1 if one of them survived and is not argued for."""
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("-k", metavar="PATTERN", default="", help="only rows whose file, function or name matches")
    asked = parser.parse_args()
    checkout = Checkout(ROOT)
    rows = [row for row in MUTANTS if any(re.search(asked.k, f"{file}: {row}") for file in checkout.files(row))]
    if not rows:
        parser.error(f"no row has {asked.k!r} in its file, function or name")
    import torch
    import torch._dynamo  # the first optimizer imports it, which takes seconds

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="midstride-mutants-", dir=FOLDER) as folder:
        copy = Copy(ROOT, Path(folder))
        # Without a bug: a test that fails anyway kills nothing.
        control = copy.tested(sorted({test for row in rows for test in copy.checkout.tests_of(row)}), CONTROL_S)
        if control.code != 0:
            print(control.output, "the tests do not pass without a planted bug, either", sep="\n")
            return 2
        return 0 if run(copy, rows, control.taken_s) else 1


if __name__ == "__main__":
    sys.exit(main())
