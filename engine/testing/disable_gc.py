"""Imported first in the process that forks ranks. Disables garbage collection meanwhile."""

import gc

gc.disable()
