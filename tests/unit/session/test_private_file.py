"""Files that other users of a machine cannot put in the way, read or write."""

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from midstride.engine.errors import WorldError
from midstride.engine.session.private_file import AnonymousFile, own_folder

pytestmark = pytest.mark.fast


def test_an_anonymous_file_is_open_to_its_user_only() -> None:
    made = AnonymousFile()
    code = "import os, sys; os.write(os.open(sys.argv[1], os.O_RDWR), b'theirs')"
    assert subprocess.run([sys.executable, "-c", code, made.path], check=True).returncode == 0
    other = AnonymousFile.at(made.path)
    assert os.pread(other.handle, 100, 0) == b"theirs"
    path = made.path
    del made
    assert os.pread(other.handle, 100, 0) == b"theirs", "it has another holder"
    with pytest.raises(WorldError, match=r"the process that held .* has ended"):
        AnonymousFile.at(path)


#: what another user has put in the place of the folder
SQUATS: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: None,
    "a FIFO": os.mkfifo,
    "a link": lambda path: path.symlink_to(path.parent),
    "a folder that others can enter": lambda path: path.mkdir(mode=0o755),
    "a file": Path.touch,
}


@pytest.mark.parametrize("what", SQUATS)
def test_no_other_user_can_take_the_folder(what: str, tmp_path: Path) -> None:
    temporary, state = tmp_path / "tmp", tmp_path / "state"
    temporary.mkdir()
    SQUATS[what](temporary / f".midstride-{os.geteuid()}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(temporary))
        patch.setenv("XDG_STATE_HOME", str(state))
        found = own_folder()
        assert found.is_relative_to(temporary if what == "nothing" else state)
        assert stat.S_IMODE(found.stat().st_mode) == 0o700
        assert own_folder() == found
        if what != "nothing":
            found.chmod(0o755)
            with pytest.raises(PermissionError, match="open to other users"):
                own_folder()
