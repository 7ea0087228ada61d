"""Imported first by the process that ranks are forked from: disables the garbage collector during its imports."""

import gc

gc.disable()
