"""A crash in native code leaves Python's stack, unless a library lives on such signals."""

import subprocess
import sys
from pathlib import Path

import pytest

from midstride.engine.session.crash import crash_file, crashes_in

CRASH = """
import ctypes, faulthandler, os, signal, sys
from pathlib import Path
from midstride.engine.session.crash import crash_file, note_crashes

before = sys.argv[2]
if before == "handled":  # by a library, whose handler Python does not know
    ctypes.CDLL(None).signal(signal.SIGSEGV, ctypes.cast(ctypes.CDLL(None).abort, ctypes.c_void_p))
if before == "enabled":
    faulthandler.enable()
note_crashes(crash_file(Path(sys.argv[1]), 3))
if before == "in a fork" and os.fork():
    os.wait()
    sys.exit()
os.kill(os.getpid(), signal.SIGABRT if before == "aborted" else signal.SIGSEGV)
"""


@pytest.mark.parametrize(
    ("before", "said"),
    [
        ("", ["a segmentation fault (SIGSEGV)"]),
        ("enabled", ["a segmentation fault (SIGSEGV)"]),
        ("aborted", ["an abort (SIGABRT)"]),
        ("handled", []),
        ("in a fork", []),
    ],
)
def test_a_crash_leaves_its_stack(before: str, said: list[str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(CRASH)
    subprocess.run([sys.executable, str(script), str(tmp_path), before], check=False, capture_output=True)
    found = crashes_in(tmp_path)
    assert [crash.rank for crash in found] == [3] * len(said)
    for crash, words in zip(found, said, strict=True):
        assert f"rank 3 crashed in native code, {words}, called by <module>, script.py:" in crash.error
    assert crash_file(tmp_path, 3).exists() == (before != "handled")
