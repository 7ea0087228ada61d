"""What a job says: its file, its options, its names. Needs no torch."""
