"""The state of a run as a tree: what holds it, how it becomes files, where two differ."""
