"""A kill or an error at any system call by which a life of a run touches its disk, injected by strace."""

import ctypes
import gc
import os
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from faults.test_commit_calls import assert_nothing_lost, close_writers, keep_best, life
from support.snapshot_writers import alone, take

from midstride.engine.storage.store import Store

_WRITES = "write,pwrite64,fsync,mkdir,rename,renameat,link,linkat,unlink,unlinkat"
#: what befalls -> the calls that it befalls, what strace injects, and whether also at all calls that follow
KINDS = {
    "killed": (f"{_WRITES},openat,getdents64", "signal=SIGKILL", False),
    "EIO": (f"{_WRITES},openat,read,getdents64", "error=EIO", False),
    "ENOSPC": (_WRITES, "error=ENOSPC", True),
    "EDQUOT": (_WRITES, "error=EDQUOT", True),
}
_PR_SET_PTRACER, _ANYONE = 0x59616D61, ctypes.c_ulong(-1)


def lived(store: Store, calls: str, inject: str, log: Path) -> int:
    """Give the run a life in a process of its own, of which strace strikes some calls; return how it ended."""
    waits, goes = os.pipe()
    if (child := os.fork()) == 0:
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _ANYONE, 0, 0, 0)
            os.close(goes)
            os.read(waits, 1)
            gc.freeze()  # see `test_commit_calls`
            with suppress(Exception):
                life(store)
        finally:
            os._exit(0)
    os.close(waits)
    attach = ["strace", "-f", "-p", str(child), "-o", str(log)]
    command = [*attach, "-e", f"trace={calls}", "-e", f"inject={calls}:{inject}"]
    tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert tracer.stderr is not None
    attached = "attached" in tracer.stderr.readline()
    os.write(goes, b".")
    os.close(goes)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    tracer.communicate()
    if not attached:
        pytest.skip("strace cannot attach to a process here")
    return code


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_committed_is_lost_at_any_system_call(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The calls of each thread are counted. Those of threads that sync drafts are struck in `test_commit_calls`."""
    every = 1 if request.config.getoption("laws") == "all" else 5
    calls, inject, goes_on = KINDS[kind]
    first = alone(Store.open(tmp_path / "run"), keep=1)
    keep_best(first, 1)
    take(first, 1)
    close_writers()
    number, struck = 1, 0
    while True:
        folder, log = tmp_path / str(number), tmp_path / "calls.txt"
        shutil.copytree(tmp_path / "run", folder)
        code = lived(Store.open(folder), calls, f"{inject}:when={number}{'+' * goes_on}", log)
        lines = log.read_text()
        hit = code == -signal.SIGKILL if kind == "killed" else "(INJECTED)" in lines
        if not hit:
            break
        assert_nothing_lost(Store.open(folder), f"{kind} at call {number}")
        shutil.rmtree(folder)
        struck += 1
        number += every
    assert struck >= 5
