"""Numbers of layers per stage: given, or balanced by size or time."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from midstride.engine.code_origin import is_user_class
from midstride.engine.errors import UserError

__all__ = ["balance_stages", "bounds", "faults_of", "sizes_of", "tensors_of", "times_of"]

#: bytes in training for each byte of parameters: the parameter, its gradient, and the two averages of Adam
_KEPT = 4
#: seconds for which layers are timed, after one pass for warm-up
_MEASURED_S = 0.5
_PASSES = 3

Layers = Sequence[nn.Module]


def bounds(balance: Sequence[int]) -> list[tuple[int, int]]:
    """Return for each stage the index of its first layer, and the index after its last layer.

    >>> bounds([2, 1])
    [(0, 2), (2, 3)]
    """
    ends = list(accumulate(balance))
    return list(zip([0, *ends[:-1]], ends, strict=True))


def faults_of(layers: Layers, balance: Sequence[int]) -> list[str]:
    """Return messages on why `layers` cannot be cut by `balance`."""
    if sum(balance) != len(layers):
        return [f"balance={list(balance)} cuts {sum(balance)} layers, and sequential_module has {len(layers)}"]
    faults = []
    for stage, (start, end) in enumerate(bounds(balance)):
        if not _trains(layers[start:end]):
            kinds = ", ".join(type(layer).__name__ for layer in layers[start:end])
            faults.append(
                f"balance={list(balance)} leaves stage {stage} nothing to train: layers {start} to {end - 1} ({kinds}) "
                "have no parameters: cut elsewhere, or use fewer stages"
            )
        if stage and start in (tied := _ties(layers)):
            one, other = tied[start]
            faults.append(
                f"balance={list(balance)} cuts between layers {one} and {other}, which share a parameter, a buffer "
                "or a layer of yours: keep them in one stage, or give each its own"
            )
    return faults


def balance_stages(costs: Sequence[float], layers: Layers, stages: int) -> list[int]:
    """Return the number of layers of each stage that minimises the largest cost of a stage.

    Args:
        costs: cost of each layer.
        layers: each stage gets at least one layer that trains; layers that share tensors or submodules stay together.
        stages: number of stages.

    Raises:
        UserError: no such division exists.

    Source:
        the linear partition problem, Skiena, The Algorithm Design Manual, 8.5; O(stages * layers^2).
    """
    count, before = len(layers), [0.0, *accumulate(costs)]
    tied, trained = _ties(layers), [0, *accumulate(int(_trains([layer])) for layer in layers)]
    never = float("inf")
    best = [[0.0] + [never] * count] + [[never] * (count + 1) for _ in range(stages)]
    cut = [[0] * (count + 1) for _ in range(stages + 1)]
    for stage in range(1, stages + 1):
        for end in range(stage, count + 1):
            for start in range(stage - 1, end):
                cost = max(best[stage - 1][start], before[end] - before[start])
                if cost < best[stage][end] and start not in tied and trained[start] < trained[end]:
                    best[stage][end], cut[stage][end] = cost, start
    if best[stages][count] == never:
        raise UserError(
            f"sequential_module has {count} layers, and there is no way to cut them into {stages} stages: use fewer "
            "processes or stages. Each stage needs parameters to train, and layers that share parameters must be in "
            "one stage."
        )
    balance, end = [], count
    for stage in range(stages, 0, -1):
        balance.append(end - cut[stage][end])
        end = cut[stage][end]
    return balance[::-1]


def sizes_of(layers: Layers, x: Any = None, micro_batches: int = 1) -> list[float]:
    """Return the bytes of each layer in training: weights, gradients, Adam's averages, outputs.

    Args:
        layers: on the host.
        x: one micro-batch; None leaves outputs out.
        micro_batches: number of micro-batches in a batch, whose outputs can all be in memory.
    """
    weights = [_KEPT * sum(p.numel() * p.element_size() for p in layer.parameters()) for layer in layers]
    outputs = [0] * len(layers)
    if x is not None:
        with torch.no_grad():
            for number, layer in enumerate(layers):
                x = layer(x)
                outputs[number] = micro_batches * sum(t.numel() * t.element_size() for t in tensors_of(x))
    return [float(weight + output) for weight, output in zip(weights, outputs, strict=True)]


def times_of(layers: Layers, x: Any, device: torch.device) -> list[float]:
    """Return the seconds that each layer takes for forward and backward pass of one micro-batch.

    Args:
        layers: on the host; afterwards they are there again, without gradients.
        x: one micro-batch.
        device: where layers are timed, one at a time, because all together can be too large.
    """
    seconds = []
    for layer in layers:
        with _on(layer, device):
            x = _leaf(x, device)
            y = _forward_backward(layer, x)
            passes: list[float] = []
            while len(passes) < _PASSES or sum(passes) < _MEASURED_S / len(layers):
                began = _now(device)
                _forward_backward(layer, x)
                passes.append(_now(device) - began)
            seconds.append(min(passes))  # the pass that other work on the machine disturbed least
            x = y
    return seconds


def tensors_of(value: Any) -> tuple[Tensor, ...]:
    """Return the outputs of a layer, a tensor or a tuple of tensors, as a tuple.

    Raises:
        UserError: they are something else.
    """
    given = value if isinstance(value, tuple) else (value,)
    if all(isinstance(tensor, Tensor) for tensor in given):
        return given
    kinds = ", ".join(type(other).__name__ for other in given if not isinstance(other, Tensor))
    raise UserError(f"layers of sequential_module exchange {kinds}: return tensors or tuples of tensors from them.")


def _forward_backward(layer: nn.Module, x: Any) -> Any:
    y = layer(x)
    trained = [tensor for tensor in tensors_of(y) if tensor.requires_grad]
    torch.autograd.backward(trained, [torch.zeros_like(tensor) for tensor in trained])
    return y


def _leaf(value: Any, device: torch.device) -> Any:
    moved = tuple(t.detach().to(device).requires_grad_(t.is_floating_point()) for t in tensors_of(value))
    return moved if isinstance(value, tuple) else moved[0]


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@contextmanager
def _on(layer: nn.Module, device: torch.device) -> Iterator[None]:
    layer.to(device)
    try:
        yield
    finally:
        for parameter in layer.parameters():
            parameter.grad = None
        layer.to("cpu")


def _trains(layers: Layers) -> bool:
    return any(parameter.requires_grad for layer in layers for parameter in layer.parameters())


def _ties(layers: Layers) -> dict[int, tuple[int, int]]:
    """Return pairs of layers that share something, by the index where no stage can begin.

    They share a parameter, a buffer or a module of a user's class, which can have state. A module of torch that
    occurs twice, such as an activation, can be copied to each stage.
    """
    first: dict[int, int] = {}
    tied = {}
    for number, layer in enumerate(layers):
        own = [part for part in layer.modules() if is_user_class(type(part))]
        for shared in (*layer.parameters(), *layer.buffers(), *own):
            start = first.setdefault(id(shared), number)
            tied.update({cut: (start, number) for cut in range(start + 1, number + 1)})
    return tied
