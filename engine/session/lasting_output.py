"""Standard output that a closed pipe or a full disk does not turn into an error: a training goes on without it."""

import os
import sys
from typing import TextIO

__all__ = ["LastingOutput"]


class LastingOutput:
    """Standard output; after an error the rest is dropped, which standard error says once.

    An error comes when its reader has ended, its disk is full or its terminal is closed. A character that is not in
    its encoding is written as an escape.
    """

    def __init__(self) -> None:
        self._stream: TextIO = sys.stdout
        self.encoding = self._stream.encoding

    def write(self, text: str) -> int:
        """Write `text`, as far as that is possible."""
        try:
            try:
                return self._stream.write(text)
            except UnicodeEncodeError:
                return self._stream.write(text.encode(self.encoding, "backslashreplace").decode(self.encoding))
        except OSError as error:
            self._give_up(error)
            return len(text)

    def flush(self) -> None:
        """Have written what was kept back."""
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def isatty(self) -> bool:
        """Return whether this is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """Return the file descriptor of standard output."""
        return self._stream.fileno()

    def _give_up(self, error: OSError) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
        if not isinstance(error, BrokenPipeError):
            why = f"standard output takes no more ({error.strerror}): what else it would show is left out\n"
            os.write(2, why.encode())
