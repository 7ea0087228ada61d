"""Optimizers, learning rates and precision."""
