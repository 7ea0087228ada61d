"""`midstride init`: a project that trains, to put one's own model and data into."""

import shlex
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from midstride.engine.errors import UserError

__all__ = ["init"]

Folder = Annotated[Path, Parameter(help="Folder to write to; it is made if it is missing.")]
Kind = Annotated[
    Literal["points", "images", "text", "tabular", "lightning", "huggingface", "script"],
    Parameter(help="What it trains on, or with: each is small and needs no download."),
]

#: kind -> file of its code, and what the file holds; `_MODULE` for all others
_CODE = {"script": ("train.py", "a script with a loop of its own")}
_MODULE = "model.py", "a module and its data"
#: kind -> libraries that it needs beside those of midstride
_NEEDS = {"images": "scikit-learn", "lightning": "lightning", "huggingface": "transformers datasets"}


def init(folder: Folder = Path(), /, *, kind: Kind = "points") -> int:
    """Write a small project: model.py with a module and its data, or a script, and job.yaml.

    No file is replaced.
    """
    code, content = _CODE.get(kind, _MODULE)
    if there := [name for name in (code, "job.yaml") if (folder / name).exists()]:
        raise UserError(f"{folder.absolute()} has {' and '.join(there)} already, and nothing was written: name another")
    template = files("midstride.engine.cli") / "template"
    if kind != "points":
        template /= kind
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in (code, "job.yaml"):
            (folder / name).write_bytes((template / name).read_bytes())
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error}. Name another folder") from error
    enter = "" if folder.absolute() == Path.cwd() else f"cd {shlex.quote(str(folder))}\n  "
    install = f"pip install {_NEEDS[kind]}\n  " if kind in _NEEDS else ""
    print(
        f"{folder / code}: {content}\n{folder / 'job.yaml'}: a job\n\n"
        f"  {enter}{install}midstride check job.yaml\n  midstride train job.yaml --run first"
    )
    return 0
