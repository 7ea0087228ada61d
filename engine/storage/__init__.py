"""Files on any URL. Needs no torch."""
