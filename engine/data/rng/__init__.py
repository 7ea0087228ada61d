"""Random numbers in the data, by a sample's position, without effect on main generators.

fast_state        reads and seeds the main generators, fast enough for trivial data sets
isolation         restores the main process's generators after data were read in it
owned_generators  the generators that a data set or a collate_fn holds, and their seeders
per_sample        seeds the random numbers of each sample, so that they need no saved state
repeatability     whether two readings of a sample are the same
"""
