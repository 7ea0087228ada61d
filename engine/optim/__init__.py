"""Optimizers, learning rate schedulers and precision.

optimizers  reads the result of `configure_optimizers`; the state of optimizers, and which parameters each trains
precision   the arithmetic of a module: 32, bf16, 16 (with a gradient scaler) or 64 bits
schedulers  when each learning rate scheduler steps, their state, and the learning rates that torch keeps

Tests: tests/unit/optim, tests/laws/objects/optimizers.py
"""
