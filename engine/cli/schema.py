"""`midstride schema`: the JSON schema of job files, for editors."""

import json
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from midstride.engine.config.job import TrainingJob
from midstride.engine.config.json_schema import file_schema
from midstride.engine.errors import UserError

__all__ = ["schema"]

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
