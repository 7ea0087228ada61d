"""The undisturbed runs of the laws, to compare with, and worlds whose processes a test watches."""

from faults.watched_worlds import scene, watcher
from laws.conftest import undisturbed

__all__ = ["scene", "undisturbed", "watcher"]
