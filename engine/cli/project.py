"""`midstride init | schema`: a project that trains, and the JSON schema of job files."""

import json
import shlex
import sys
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from midstride.engine.config.job import TrainingJob
from midstride.engine.config.json_schema import file_schema
from midstride.engine.errors import UserError

__all__ = ["init", "schema"]

Folder = Annotated[Path, Parameter(help="Folder to write to; created if missing.")]
Kind = Annotated[
    Literal["points", "images", "text", "tabular", "lightning", "huggingface", "script"],
    Parameter(help="Kind of project; each is small and needs no download."),
]

#: kind -> file of its code, and what the file holds; `_MODULE` for all others
_CODE = {"script": ("train.py", "a script with its own loop")}
_MODULE = "model.py", "a module and its data"
#: kind -> libraries that it needs beside those of midstride
_NEEDS = {"images": "scikit-learn", "lightning": "lightning", "huggingface": "transformers datasets"}


def init(folder: Folder = Path(), /, *, kind: Kind = "points") -> int:
    """Write a small project: model.py with a module and its data, or a script, and job.yaml.

    No file is replaced.
    """
    code, content = _CODE.get(kind, _MODULE)
    if there := [name for name in (code, "job.yaml") if (folder / name).exists()]:
        raise UserError(
            f"{folder.absolute()} has {' and '.join(there)} already, so nothing was written: name another folder"
        )
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


Output = Annotated[Path | None, Parameter(help="File to write, such as job.schema.json; standard output if empty.")]


def schema(*, output: Output = None) -> int:
    """Print the JSON schema of job files, and the line that makes an editor use it."""
    text = json.dumps(file_schema(TrainingJob.model_json_schema()), indent=1)
    if output is None:
        print(text)
    else:
        try:
            output.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"{output} cannot be written: {error.strerror}. Name another file") from error
    place = output or "job.schema.json"
    print(f"first line of the job file:\n# yaml-language-server: $schema={place}", file=sys.stderr)
    return 0
