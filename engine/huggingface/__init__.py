"""Exact resume for `transformers.Trainer` and its derivatives.

transformers_internals  `Resumable`, and all that is private to transformers
windows                 the batches of an optimizer step, read as one

Tests: tests/unit/huggingface, tests/laws/test_resumable.py
"""

from midstride.engine.huggingface.transformers_internals import Resumable

__all__ = ["Resumable"]
