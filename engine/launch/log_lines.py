"""Which lines of a world are worth a person's time; the attempt's log file has them all."""

import re
from collections.abc import Iterable

__all__ = ["without_noise"]

#: what torchrun's agent and gloo say of themselves: the cause is said by the rank that met it, and by the outcome
_NOISE = re.compile(
    r"^([IWEF]\d{4} [\d:.]+ +\d+ .*\btorch/distributed/(elastic|launcher|run)|\[Gloo\] Rank \d+ is connected to |"
    # Its stores', of a rank that has gone, with the stack in C++
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
