"""Imported last in the process that forks ranks: ranks do not collect its objects.

A collection in a rank would write to every object of torch and so copy its memory pages, which takes most of the time
of a short attempt.
"""

import gc

gc.freeze()
gc.enable()
