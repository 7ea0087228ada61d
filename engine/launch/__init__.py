"""A world of processes from its start to its end."""
