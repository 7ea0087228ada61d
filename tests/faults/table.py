"""The table of faults: fault, result and message. `docs/faults.md` shows it."""

import re
from dataclasses import dataclass, field

from faults.strikes import (
    Strike,
    damage,
    disk_full,
    flipped,
    frozen_and_killed,
    itself,
    launcher_killed,
    misread,
    missing,
    not_finite,
    overtaken,
    read_only,
    server,
    slow,
    torn,
    unreadable,
    wrong_secret,
)

#: what some rank ends with
KILLED, FAILED, REFUSED, STOPPED, DONE = -9, 1, 2, 75, 0
#: what the world ends with then
CODES = {KILLED: 1, FAILED: 1, REFUSED: 2, STOPPED: 75, DONE: 0}
#: what stands in a message for what differs from time to time
BLANKS = {
    "name": r"[\d.]+-g\d{6}",
    "file": r"[\w.-]+",
    "path": r"\S+",
    "number": r"\d+",
    "checksum": r"\w{32}",
    "block": r"( \(the block at byte \d+\))?",
    "reason": r".+",
    "server": r"http://127\.0\.0\.1:\d+",
}

_TENSORS, _TREE = "rank-00001-of-00002.safetensors", "rank-00001-of-00002.json"
_METRICS, _MANIFEST = "metrics.csv", "manifest.json"
#: what a person calls them
_CALLED = {_TENSORS: "tensors", _TREE: "tree", _METRICS: "metric rows"}
_ASIDE = "snapshot {name} is set aside, an older one is taken: {url}/snapshots/{name}/{file}"


@dataclass(frozen=True)
class Cell:
    """A fault at a moment, on a store.

    Args:
        name: of the moment.
        strike: what happens.
        store: "local" or "s3".
        own: whether the store's server is harmed, and so must be of this test alone.
    """

    name: str
    strike: Strike
    store: str = "local"
    own: bool = False


@dataclass(frozen=True)
class Row:
    """A fault.

    Args:
        fault: what happens to the run.
        then: what happens, in a sentence for people.
        code: what some rank ends with; 0 where the run gets over it in the same life.
        cells: when and where.
        says: a line that a person reads; for the {blanks}, see `BLANKS`, and {url} is the run's.
    """

    fault: str
    then: str
    code: int
    cells: list[Cell] = field(default_factory=list)
    says: str = ""

    def is_said(self, line: str, url: str) -> bool:
        """Whether `line` is what this row says, word by word."""
        pattern = re.escape(self.says.replace("{url}", url))
        for blank, form in BLANKS.items():
            pattern = pattern.replace(re.escape(f"{{{blank}}}"), form)
        return re.fullmatch(pattern, line) is not None


_DAMAGED = "The previous snapshot is loaded."

ROWS = [
    Row(
        "A rank is killed (SIGKILL, out of memory, a lost machine)",
        "The next attempt resumes from the newest snapshot.",
        KILLED,
        [
            Cell("in backward", itself("kill", 1, step=5, phase="backward")),
            Cell("while writing", itself("kill", 1, step=6, phase="snapshot_write")),
            Cell("before the commit", itself("kill", 0, step=6, phase="before_commit")),
            Cell("in validation", itself("kill", 1, step=3, phase="validation")),
            Cell("while writing", itself("kill", 1, step=6, phase="snapshot_write"), "s3"),
        ],
    ),
    Row(
        "All ranks are killed at once",
        "The next attempt resumes from the newest snapshot.",
        KILLED,
        [Cell("before the commit", itself("kill", 0, 1, step=6, phase="before_commit"))],
    ),
    Row(
        "The launcher is killed (SIGKILL)",
        "Its ranks end at once. The next attempt resumes from the newest snapshot.",
        KILLED,
        [Cell("in backward", launcher_killed)],
    ),
    Row(
        "A rank freezes (SIGSTOP), and is killed",
        "The others wait until it is killed. The next attempt resumes.",
        KILLED,
        [Cell("in backward", frozen_and_killed)],
    ),
    Row(
        "The loss is not finite",
        "Earlier snapshots are intact. Correct the cause, then repeat the command.",
        REFUSED,
        [Cell("in training", not_finite)],
        says="the loss is nan (epoch {number}, batch {number}, step {number}, rank {number}). "
        "Nothing was written since; earlier snapshots are intact. Repeating the command fails again: lower the "
        "learning rate, clip gradients (gradient_clip_val), or leave such batches out (on_nan: skip).",
    ),
    Row(
        "A rank is asked to stop (SIGTERM)",
        "All ranks take a snapshot together and end. The next attempt resumes from it.",
        STOPPED,
        [
            Cell("in forward", itself("stop", 1, step=5, phase="forward")),
            Cell("in backward", itself("stop", 0, step=7, phase="backward"), "s3"),
        ],
    ),
    Row(
        "An exception in the engine or below it",
        "The next attempt resumes from the newest snapshot.",
        FAILED,
        [
            Cell("in the optimizer", itself("raise", 1, step=5, phase="optimizer_step")),
            Cell("while writing", itself("raise", 1, step=6, phase="snapshot_write")),
        ],
    ),
    Row(
        "A process group that was presumed dead resumes after its replacement has started",
        "It stops before a commit. Nothing reads its writes.",
        STOPPED,
        [Cell("before the commit", overtaken, "s3")],  # in a folder: `test_one_writer`
        says="another attempt (generation 2) has taken over {url}: this one (generation 1) has stopped",
    ),
    Row(
        "A file of the newest snapshot is torn",
        _DAMAGED,
        KILLED,
        [
            Cell("tensors, nothing left", damage(_TENSORS, torn(0.0))),
            Cell("tensors, half", damage(_TENSORS, torn(0.5))),
            Cell("tensors, all but a byte", damage(_TENSORS, torn(1.0))),
            Cell("tree, half", damage(_TREE, torn(0.5))),
            Cell("metric rows, half", damage(_METRICS, torn(0.5))),
            Cell("tensors, half", damage(_TENSORS, torn(0.5)), "s3"),
        ],
        says=_ASIDE + " has {number} bytes, its manifest says {number}",
    ),
    Row(
        "A bit of the newest snapshot flips",
        _DAMAGED,
        KILLED,
        [*(Cell(_CALLED[file], damage(file, flipped)) for file in (_TENSORS, _TREE, _METRICS))],
        says=_ASIDE + " has checksum {checksum}, its manifest says {checksum}{block}",
    ),
    Row(
        "The manifest of the newest snapshot is torn",
        _DAMAGED,
        KILLED,
        [Cell("half", damage(_MANIFEST, torn(0.5)))],
        says=_ASIDE + " is no JSON document with a checksum: {reason}",
    ),
    Row(
        "A bit of the manifest of the newest snapshot flips",
        _DAMAGED,
        KILLED,
        [Cell("in a digit", damage(_MANIFEST, misread), "s3")],
        says=_ASIDE + " does not match its own checksum {reason}",
    ),
    Row(
        "A file of the newest snapshot is missing",
        _DAMAGED,
        KILLED,
        [
            *(Cell(_CALLED[file], damage(file, missing)) for file in (_TENSORS, _METRICS)),
            Cell("tree", damage(_TREE, missing), "s3"),
        ],
        says=_ASIDE + " is missing, its manifest says {number} bytes",
    ),
    Row(
        "A file of the newest snapshot cannot be read",
        "It is set aside if an older one is readable, which is then loaded.",
        KILLED,
        [Cell("a folder in its place", unreadable)],
        says=f"{_ASIDE} cannot be read: {{reason}}",
    ),
    Row(
        "The manifest of the newest snapshot is missing",
        "That snapshot does not exist. The previous one is loaded.",
        KILLED,
        [Cell("gone", damage(_MANIFEST, missing))],
    ),
    Row(
        "The disk is full",
        "The unfinished snapshot is removed and the attempt ends. With free space, the next one resumes.",
        FAILED,
        [Cell("at a later snapshot", disk_full)],
        says="snapshot {name} was not taken, rank {number} says: best/{name} was not written, rank {number} says: "
        "{url} cannot be written: [Errno {number}] {reason}. Free some space: the same command then resumes the run.",
    ),
    Row(
        "The store may not be written",
        "Refused within seconds, before training starts.",
        REFUSED,
        [Cell("at the start", read_only)],
        says="{url} cannot be written: [Errno {number}] {reason}: {path} "
        "Allow it, or choose another place: snapshots.url of a job, run= of a script.",
    ),
    Row(
        "The S3 server is killed and restarted",
        "The write is retried until the store responds (snapshots.store_patience_s). Nothing is lost.",
        DONE,
        [
            Cell("while writing", server("killed", step=6, phase="snapshot_write"), "s3", own=True),
            Cell("before the commit", server("killed", step=6, phase="before_commit"), "s3", own=True),
        ],
        says="{url} does not answer, waiting up to 300 s: {server}: Connect call failed {reason}",
    ),
    Row(
        "The S3 server does not answer for a while",
        "The write is retried until the store responds (snapshots.store_patience_s). Nothing is lost.",
        DONE,
        [Cell("while writing", server("frozen", step=6, phase="snapshot_write"), "s3", own=True)],
        says="{url} does not answer, waiting up to 300 s: {server}: ReadTimeoutError",
    ),
    Row("The S3 server is slow", "Training continues.", DONE, [Cell("all the time", slow, "s3")]),
    Row(
        "The credentials are wrong",
        "Refused within seconds, before training starts.",
        REFUSED,
        [Cell("at the start", wrong_secret, "s3")],
        says="{url} cannot be written: SignatureDoesNotMatch: {reason}. Set AWS_ACCESS_KEY_ID and "
        "AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or choose another place: snapshots.url of a job, run= of a script.",
    ),
]
