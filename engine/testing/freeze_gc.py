"""Imported last by the process that ranks are forked from: their garbage collector leaves alone what stands there.

A collection in a rank would touch every object of torch and so copy its pages: most of the time of a short attempt.
"""

import gc

gc.freeze()
gc.enable()
