"""Random numbers in the data: functions of where a sample stands, and the main process's left as they were.

fast_state        the main generators of a process, looked at and seeded at a cost that a trivial data set can
                  bear
isolation         the main process's generators, left as they were by data that are read in it
owned_generators  the generators that a data set or a collate_fn holds itself, and what seeds them
per_sample        random numbers in the data that need no saved state
raw_memory        where the main generators keep their words in memory, read in 0.2 us and set back
repeatability     whether two readings of a sample are the same
"""
