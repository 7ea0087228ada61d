"""What a world leaves when it ends: no process, and its output in whole lines."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from faults.watched_worlds import Scene, group_of, until
from support.limit import LIMIT_S

from midstride.engine.processes.supervised_process import SupervisedProcess

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the ties are those of Linux")


def test_what_a_world_leaves_behind_at_its_own_end(scene: Scene) -> None:
    with group_of(scene, "inline", "leaves") as group:
        until(lambda: group.poll() is not None, "the group to end")
        assert group.poll() == 0
        assert not scene.living(), "the supervisor ends them, also where no launcher watches any more"


def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    with SupervisedProcess(["/no/such"], environment=dict(os.environ), log=tmp_path / "log", grace_s=1) as group:
        assert group.wait(LIMIT_S) == 127
    assert "cannot run /no/such" in (tmp_path / "log").read_text()


def test_output_comes_in_whole_lines(tmp_path: Path) -> None:
    code = r"""
import sys, time
from pathlib import Path
print("\r1 %\r2 %\r\n", end="ha", flush=True)
while not Path(sys.argv[1]).exists():
    time.sleep(0.01)
print("lf\xe9")
sys.stdout.write("end")
"""
    seen, batches = tmp_path / "seen", list[list[str]]()
    command = [sys.executable, "-c", code, str(seen)]

    def ended() -> bool:
        if lines := group.lines():
            batches.append(lines)
            seen.touch()
        return group.poll() is not None

    with SupervisedProcess(command, environment=dict(os.environ), log=tmp_path / "log", grace_s=1) as group:
        until(ended, "the group to end")
    batches.append(group.lines())
    assert [line for batch in batches for line in batch] == ["", "1 %", "2 %", "halfé", "end"]
    assert len([batch for batch in batches if batch]) > 1


#: A rank that prints, and says so if printing fails.
TALKER = """
import signal, sys, time
from pathlib import Path
folder, told = Path(sys.argv[1]), []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
(folder / f"rank-{__import__('os').getpid()}").touch()
(folder / f"grandchild-{__import__('os').getpid()}").touch()
try:
    while not told:
        print("still here " * 1000, flush=True)
        time.sleep(0.01)
    for _ in range(100):
        print("leaving " * 1000, flush=True)
    (folder / "left").touch()
except BaseException as error:
    (folder / "failed").write_text(repr(error))
"""


def test_ranks_can_print_after_their_watcher_was_killed(
    scene: Scene, watcher: Callable[..., subprocess.Popen[bytes]]
) -> None:
    scene.rank_script = scene.script("talker", TALKER)
    watcher("inline", "talks", grace_s=LIMIT_S).kill()
    scene.nobody_left()
    assert not (scene.folder / "failed").exists()
    assert (scene.folder / "left").exists()
