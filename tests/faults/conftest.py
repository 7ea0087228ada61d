"""The undisturbed runs of the laws, to compare with."""

from laws.conftest import undisturbed

__all__ = ["undisturbed"]
