"""Imported last by the process that ranks are forked from: excludes its objects from garbage collection in the ranks.

A collection in a rank would write to every object of torch and so copy its memory pages, which takes most of the time
of a short attempt.
"""

import gc

gc.freeze()
gc.enable()
