"""A file of functions that modules of other files call: what it holds decides what they train."""

import itertools

import numpy as np
import torch

numbers = np.random.default_rng(11)
more_numbers = torch.Generator().manual_seed(3)
STEPS = 0


def count() -> int:
    global STEPS
    STEPS += 1
    return STEPS


def noise() -> float:
    return float(numbers.normal()) + float(torch.rand((), generator=more_numbers))


class Numbered:
    ids = itertools.count(1)

    def __init__(self) -> None:
        self.number = next(Numbered.ids)


def soft(value: float) -> float:
    return value


def hard(value: float) -> float:
    return 3 * value


act = soft
