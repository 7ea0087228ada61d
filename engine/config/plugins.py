"""Plugins that a job names by import path, with arguments: its callbacks."""

from typing import Annotated

from pydantic import AfterValidator, Field

from midstride.engine.config.arguments import Arguments
from midstride.engine.config.import_paths import IMPORT_PATH, import_path
from midstride.engine.config.json_schema import plugin_schema
from midstride.engine.config.options import Options

__all__ = ["CallbackOptions", "ImportPath"]

ImportPath = Annotated[str, AfterValidator(import_path), Field(json_schema_extra={"pattern": IMPORT_PATH})]


class CallbackOptions(Options, json_schema_extra=plugin_schema):
    """A callback of your own, built in all ranks. Its `state_dict` is part of the run's state."""

    path: ImportPath = Field(title="Callback", description="package.module:attribute of the Callback.")
    args: Arguments = Field({}, title="Arguments", description="Keyword arguments of the callback.")
