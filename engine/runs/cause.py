"""An error in one line."""

import re
from itertools import takewhile

from midstride.engine.code_origin import is_user_file

__all__ = ["cause_of"]

_FRAME = re.compile(
    r'^  File "(?P<path>(?:.*[/\\])?(?P<file>[^"/\\]+))", line (?P<line>\d+), in (?P<function>.+)$', re.MULTILINE
)
_WHERE = re.compile(r"^raised in (?P<where>\S+)", re.MULTILINE)

#: lines that are repeated of those that a first line announces
_ANNOUNCED = 3


def cause_of(error: str) -> str:
    r"""Return an error in one line.

    Of a traceback, the exception and the user's line: the innermost one outside libraries. Else the first line.

    >>> cause_of('Traceback (most recent call last):\n  File "/a/net.py", line 5, in training_step\n    raise ...\n'
    ...          'ValueError: 3 is odd\nraised in Net.training_step')
    'ValueError: 3 is odd (Net.training_step, net.py:5)'
    >>> cause_of('Traceback (most recent call last):\n  File "/a/net.py", line 5, in forward\n    call(x)\n'
    ...          '  File "/lib/site-packages/kit/core.py", line 9, in call\n    raise ...\nValueError: no x')
    'ValueError: no x (forward, net.py:5)'
    >>> cause_of("rank 1 was killed.\nrank 0 then said: connection closed")
    'rank 1 was killed.'
    >>> cause_of("2 faults in job.yaml:\n  seed: is missing\n  name: is missing\nto go on: write them")
    '2 faults in job.yaml: seed: is missing; name: is missing'
    """
    lines = [line for line in error.strip().splitlines() if line.strip()]
    if not lines:
        return ""
    if not lines[0].startswith("Traceback"):
        return _headline(lines)
    frames, where = list(_FRAME.finditer(error)), _WHERE.search(error)
    exception = next((line for line in reversed(lines) if _is_exception(line)), lines[-1])
    if not frames:
        return exception
    last = next((frame for frame in reversed(frames) if is_user_file(frame["path"])), frames[-1])
    name = last["function"]
    if where and where["where"].rpartition(".")[2] == name:
        name = where["where"]
    return f"{exception} ({name}, {last['file']}:{last['line']})"


def _headline(lines: list[str]) -> str:
    """Return the first line. If it ends in a colon, add up to three lines that it announces."""
    if not lines[0].endswith(":") or len(lines) == 1:
        return lines[0]
    announced = [line.strip() for line in takewhile(lambda line: line.startswith(" "), lines[1:])] or [lines[1].strip()]
    more = f"; and {len(announced) - _ANNOUNCED} more" if len(announced) > _ANNOUNCED else ""
    return f"{lines[0]} {'; '.join(announced[:_ANNOUNCED])}{more}"


def _is_exception(line: str) -> bool:
    return not line.startswith((" ", "raised in ")) and bool(re.match(r"[A-Za-z_][\w.]*(:|$)", line))
