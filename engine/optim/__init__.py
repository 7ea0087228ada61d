"""Optimizers, learning rates and precision.

learning_rates      learning rates, wherever torch keeps them: in optimizers' groups and in schedulers
optimizers          what `configure_optimizers` may return, read into one shape
precision           the arithmetic a module trains in: 32, bf16, 16 (with a gradient scaler) or 64 bits
trained_parameters  which of a module's parameters an optimizer trains

Tests: tests/unit/optim, tests/laws/objects/optimizers.py
"""
