"""One attempt, as its launcher and its ranks see it. Needs no torch."""
