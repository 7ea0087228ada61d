"""Process trees that end together. Needs no torch."""
