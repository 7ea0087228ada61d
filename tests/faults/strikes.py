"""Strikes: ways to harm a run. Each is a context around the life it harms; after it, the cause is gone.

Every strike asserts that it struck: a fault that never came has shown nothing.
"""

import functools
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from faults.scene import Scene
from laws.lives import STEPS, Tangled
from support.flow_runs import wait_for
from support.proxy import Proxy
from torch import Tensor

from midstride.engine.snapshots.catalog import SnapshotCatalog
from midstride.engine.storage.store import Store

Strike = Callable[[Scene], AbstractContextManager[None]]


def itself(kind: Any, *ranks: int, step: int, phase: str) -> Strike:
    """`ranks` do it to themselves: see `midstride.engine.fault_injection`."""

    @contextmanager
    def strike(scene: Scene) -> Iterator[None]:
        for rank in ranks:
            scene.plan.add(kind, rank=rank, step=step, phase=phase)
        yield
        assert scene.plan.fired()  # all of them, unless the first death ended the others

    return strike


@contextmanager
def not_finite(scene: Scene) -> Iterator[None]:
    """The loss is NaN from a step on; then the user corrects that."""
    live = scene.live
    scene.live = functools.partial(live, before=_poison)
    yield
    scene.live = live


def _poison() -> None:
    step = Tangled.training_step

    def poisoned(self: Tangled, batch: Any, batch_idx: int) -> Tensor:
        loss = step(self, batch, batch_idx)
        return loss * float("nan") if self.trainer.progress.step >= 5 else loss

    Tangled.training_step = poisoned


@contextmanager
def frozen_and_killed(scene: Scene) -> Iterator[None]:
    """A rank freezes (SIGSTOP), and the user ends the run."""
    scene.plan.add("freeze", rank=1, step=8, phase="backward")
    with scene.once_frozen(lambda pid: os.kill(pid, signal.SIGKILL)):
        yield
    scene.plan.assert_all_fired()


@contextmanager
def launcher_killed(scene: Scene) -> Iterator[None]:
    """What started the ranks is killed, in the middle of a step; they end with it, even the one that cannot act."""
    frozen: list[int] = []

    def act(pid: int) -> None:
        frozen.append(pid)
        os.kill(int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
        wait_for(lambda: not Path(f"/proc/{pid}").exists(), "the frozen rank to end")

    live = scene.live
    scene.live = scene.live_launched
    scene.plan.add("freeze", rank=1, step=8, phase="backward")
    with scene.once_frozen(act):
        yield
    scene.live = live
    assert frozen
    scene.plan.assert_all_fired()


@contextmanager
def overtaken(scene: Scene) -> Iterator[None]:
    """A world freezes before it commits; another one trains the run to its end; then the first wakes up."""

    def act(pid: int) -> None:
        try:
            assert scene.live() == [0, 0], scene.said
        finally:
            os.kill(pid, signal.SIGCONT)

    scene.plan.add("freeze", rank=0, step=6, phase="before_commit")
    with scene.once_frozen(act):
        yield
    scene.plan.assert_all_fired()


# --- what lies in the store -----------------------------------------------------------------------------------------


#: setting -> codes of the ranks and a copy of the folder of a run that was killed at its end
_KILLED: dict[str, tuple[list[int], Path]] = {}


@contextmanager
def _killed_at_its_end(scene: Scene) -> Iterator[None]:
    """A rank is killed as it writes the last snapshot: they are committed in order, so all others have been.

    Runs of a setting in folders are copies of one.
    """
    live = scene.live
    scene.live = live if scene.server else functools.partial(_copied, scene, live)
    scene.plan.add("kill", rank=0, step=STEPS, phase="snapshot_write")
    yield
    scene.live = live
    scene.plan.assert_all_fired()


def _copied(scene: Scene, live: Callable[[], list[int]]) -> list[int]:
    setting = repr(scene.setting)
    if setting in _KILLED:
        codes, killed = _KILLED[setting]
        shutil.copytree(killed, scene.folder, dirs_exist_ok=True)
    else:
        codes, killed = _KILLED[setting] = live(), Path(tempfile.mkdtemp())
        shutil.copytree(scene.folder, killed, dirs_exist_ok=True)
    return codes


def damage(file: str, how: Callable[[bytes], bytes | None]) -> Strike:
    """A rank is killed, and then a file of the newest snapshot is damaged; None removes it."""

    @contextmanager
    def strike(scene: Scene) -> Iterator[None]:
        with _killed_at_its_end(scene):
            yield
        store, path = Store.open(scene.url), f"{scene.newest}/{file}"
        data = how(store.read(path))
        if data is None:
            store.remove(path)
        else:
            store.write(path, data)

    return strike


@contextmanager
def unreadable(scene: Scene) -> Iterator[None]:
    """A rank is killed, and then a folder lies where a file of the newest snapshot was."""
    with _killed_at_its_end(scene):
        yield
    path = Path(scene.url, scene.newest, "rank-00001-of-00002.safetensors")
    path.unlink()
    path.mkdir()


def torn(at: float) -> Callable[[bytes], bytes]:
    """Cut off at a share of its length."""
    return lambda data: data[: min(int(len(data) * at), len(data) - 1)]


def flipped(data: bytes, at: int | None = None) -> bytes:
    """With a bit flipped, in the middle if nothing else is said."""
    changed = bytearray(data)
    changed[len(data) // 2 if at is None else at] ^= 1
    return bytes(changed)


def misread(data: bytes) -> bytes:
    """With a bit flipped in the last digit of a manifest, which is one of its checksum's."""
    return flipped(data, at=-5)


def missing(data: bytes) -> None:
    """Gone."""


# --- where a run lies -----------------------------------------------------------------------------------------------


@contextmanager
def disk_full(scene: Scene) -> Iterator[None]:
    """There is room for one snapshot but not for two; then there is more."""
    folder = Path(scene.url).parent
    if not _mounted(folder, "size=160k"):
        live = scene.live
        scene.live = functools.partial(live, before=_small_files_only)
        yield
        scene.live = live
        return
    try:
        yield
        assert SnapshotCatalog(Store.open(scene.url)).snapshots(), "the first snapshot fits"
        drafts = [path for path in folder.rglob(".*") if path.is_file()]
        assert not drafts, "what could not be written is gone"
        subprocess.run(["mount", "-o", "remount,size=64m", folder], check=True)
    except BaseException:
        unmount(folder)
        raise


def _small_files_only() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    sys.dont_write_bytecode = True  # it would be cut off, too, and every later import of it fail
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))


@contextmanager
def read_only(scene: Scene) -> Iterator[None]:
    """The folder may be read and not written; then the user allows it."""
    folder = Path(scene.url).parent
    if _mounted(folder, "size=64m"):
        try:
            subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
            yield
            subprocess.run(["mount", "-o", "remount,rw", folder], check=True)
        except BaseException:
            unmount(folder)
            raise
    else:
        assert os.geteuid() != 0, "root may write anywhere, and may not mount here: run as another user"
        folder.chmod(0o500)
        yield
        folder.chmod(0o700)


def _mounted(folder: Path, options: str) -> bool:
    """Whether a disk of its own could be put at `folder`: that takes root."""
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    return os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0


def unmount(folder: Path) -> None:
    """Take away what a strike has put there, if it has."""
    if folder.is_mount():
        subprocess.run(["umount", folder], check=True)


# --- the S3 server --------------------------------------------------------------------------------------------------


def server(how: str, *, step: int, phase: str) -> Strike:
    """The server goes away ("killed") or stops answering ("frozen") at a moment of the run, and comes back."""

    @contextmanager
    def strike(scene: Scene) -> Iterator[None]:
        assert scene.server is not None
        gone, back = {"killed": ("kill", "start"), "frozen": ("freeze", "thaw")}[how]

        def act(pid: int) -> None:
            getattr(scene.server, gone)()
            os.kill(pid, signal.SIGCONT)
            try:
                scene.wait_until_said("does not answer, waiting")
            finally:
                getattr(scene.server, back)()

        scene.plan.add("freeze", rank=0, step=step, phase=phase)
        with scene.once_frozen(act):
            yield
        scene.plan.assert_all_fired()

    return strike


@contextmanager
def slow(scene: Scene) -> Iterator[None]:
    """Each piece of an answer takes 20 ms longer."""
    assert scene.server is not None
    with Proxy(scene.server.port, delay_s=0.02) as proxy, scene.server.reached(AWS_ENDPOINT_URL=proxy.endpoint):
        yield
        assert proxy.passed > 0


@contextmanager
def wrong_secret(scene: Scene) -> Iterator[None]:
    """The secret is another one; then it is the right one."""
    assert scene.server is not None
    with scene.server.reached(AWS_SECRET_ACCESS_KEY="wrong"):
        yield
