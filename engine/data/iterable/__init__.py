"""Iterable."""
