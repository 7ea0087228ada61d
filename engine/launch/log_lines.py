"""Drops lines of torchrun, gloo and stores about themselves; the log file keeps all."""

import re
from collections.abc import Iterable

__all__ = ["without_noise"]

#: lines of torchrun's agent and of gloo: the rank that failed prints the cause, and the outcome has it
_NOISE = re.compile(
    r"^([IWEF]\d{4} [\d:.]+ +\d+ .*\btorch/distributed/(elastic|launcher|run)|\[Gloo\] Rank \d+ is connected to |"
    # Lines of a TCPStore about a rank that has gone, with the stack in C++
    r"(\[rank\d+\]:)?\[[IWEF]\d{4} [\d:.]+ \w+\.cpp:\d+\] \[c10d\] |Exception raised from \w+ at /|"
    r"frame #\d+: |<omitting python frames>)"
)


def without_noise(lines: Iterable[str]) -> list[str]:
    """Return `lines` without those that torchrun and gloo write about their own work.

    >>> without_noise(["W1122 22:15:48.62 139 torch/distributed/elastic/multiprocessing/api.py:10] Sending", "loss 3"])
    ['loss 3']
    >>> without_noise(["[rank1]:[W1123 20:38:23.35 TCPStore.cpp:125] [c10d] recvValue failed", "frame #0: c10::Error"])
    []
    """
    return [line for line in lines if not _NOISE.match(line)]
