"""Logged values, from `self.log` to rows of the metric log."""
