"""A program in a fork of this process, with its own session, environment and exit."""

import atexit
import gc
import io
import os
import select
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NoReturn

__all__ = ["ForkedProgram", "end_process", "end_with", "exit_code", "flush_files", "take_environment"]

#: signals for which a process that forks may have handlers; no such handler may run in the fork
_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)


class ForkedProgram:
    """A child process that runs `main` like `python -m`, with methods of `subprocess.Popen`.

    Fork in the main thread, and before anything was computed on several threads: a fork has none of these threads.

    Args:
        main: the program.
        environment: its whole environment.
    """

    def __init__(self, main: Callable[[], object], environment: Mapping[str, str]) -> None:
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
        try:
            self.pid = os.fork()
            if self.pid == 0:
                end_with(lambda: _begin(main, environment))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._handle = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        """Return the exit code, -n if signal n ended it; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
                os.close(self._handle)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and return the exit code.

        Raises:
            subprocess.TimeoutExpired: it runs on after `timeout` seconds.
        """
        if self.returncode is None:
            select.select([self._handle], [], [], None if timeout is None else max(0.0, timeout))
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code


def _begin(main: Callable[[], object], environment: Mapping[str, str]) -> None:
    gc.freeze()  # what the parent has left to its collector has destructors that wait for the parent's threads
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in _HANDLED:
        signal.signal(number, signal.SIG_IGN if number == signal.SIGUSR1 else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
    take_environment(environment)
    main()


def take_environment(environment: Mapping[str, str]) -> None:
    """Set the environment of this process, and torch's threads, which it read at its import."""
    os.environ.clear()
    os.environ.update(environment)
    threads = environment.get("OMP_NUM_THREADS", "")
    if (torch := sys.modules.get("torch")) is not None and threads.isdigit():
        torch.set_num_threads(int(threads))


def end_with(main: Callable[[], object]) -> NoReturn:
    """Run `main` as an interpreter does its program, and end as `end_process` does."""
    code: object = 0
    try:
        main()
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        code = _uncaught(error)
    end_process(exit_code(code))


def exit_code(code: object) -> int:
    """Return the exit code of an interpreter for the code in a SystemExit.

    A code that is a message is printed.
    """
    if not (code is None or isinstance(code, int)):
        print(code, file=sys.stderr)
    return 0 if code is None else code & 0xFF if isinstance(code, int) else 1


def end_process(code: int) -> NoReturn:
    """Exit with `code` like an interpreter, but without unloading libraries.

    A daemon thread that is inside torch, waiting for another rank, would abort an interpreter that ends.
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for its threads, as at the end of any program
        atexit._run_exitfuncs()
        flush_files()
    finally:
        os._exit(code)


#: classes of archives by module: their last bytes are written when they are closed
_ARCHIVES = {"bz2": "BZ2File", "gzip": "GzipFile", "lzma": "LZMAFile", "zipfile": "ZipFile"}


def flush_files() -> None:
    """Flush standard streams and open files, and close archives, as an interpreter that ends.

    Files of the parent of a fork are left to it, if the fork began with `gc.freeze`. Pipes could block.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # it is None, closed, or a pipe without a reader
            stream.flush()
    archives = tuple(getattr(sys.modules[name], kind) for name, kind in _ARCHIVES.items() if name in sys.modules)
    kinds = (io.TextIOWrapper, archives, (io.BufferedWriter, io.BufferedRandom))  # each writes to the next
    files: Any = [one for one in gc.get_objects() if issubclass(type(one), (io.IOBase, *archives))]
    for kind, file in ((kind, file) for kind in kinds for file in files if issubclass(type(file), kind)):
        with suppress(Exception):  # it is closed, or its disk is full
            if stat.S_ISREG(os.fstat(getattr(file, "fp", file).fileno()).st_mode):
                file.close() if kind is archives else file.flush()


def _uncaught(error: BaseException) -> object:
    """Return an interpreter's exit code after `error`. A hook can set another."""
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit as end:
        return end.code
    return 1
