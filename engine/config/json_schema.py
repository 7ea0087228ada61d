"""JSON schema of the job, for forms and checks of parameters on a Prefect server.

pydantic writes it; here it gains what a deployed job needs, absolute paths, and the menu of strategies. What ties
choices together stands in Python alone: a run that breaks such a rule is refused when it starts.
"""

from typing import Any

from midstride.engine.config.import_paths import IMPORT_PATH

__all__ = [
    "class_schema",
    "duration_schema",
    "file_schema",
    "job_schema",
    "plugin_schema",
    "snapshots_schema",
    "switch_schema",
    "whole_schema",
]

Schema = dict[str, Any]

_ABSOLUTE = "^/"
#: an absolute path or a URL without a password
_STORE_URL = r"^(?![\w+.-]+://[^/]*:[^/]*@)(/|[A-Za-z][\w+.-]*://)"
#: options that a job without a script needs
_OF_MODULES = ["module", "data", "trainer"]
_NOT_EMPTY = {"minLength": 1}
_NOT_RELATIVE = {"not": {"type": "string", "pattern": r"^\.\.?/"}}


def class_schema(names: list[str]) -> Schema:
    """Return the schema of a strategy or launcher: one of `names`, or an own class."""
    return {
        "anyOf": [
            {"title": "Built in", "type": "string", "enum": names},
            {"title": "Your own", "type": "string", "pattern": IMPORT_PATH},
        ]
    }


def duration_schema(schema: Schema) -> None:
    """Change the schema of a duration: seconds, or a text of days, hours, minutes and seconds."""
    schema["anyOf"].append({"type": "string", "pattern": r"^\d+:\d\d:\d\d:\d\d$"})


def snapshots_schema(schema: Schema) -> None:
    """Change the schema of `SnapshotOptions`: the URL is required and independent of the worker."""
    schema["properties"]["url"].pop("default", None)
    schema["properties"]["url"]["pattern"] = _STORE_URL
    schema["required"] = [*schema.get("required", []), "url"]


def job_schema(schema: Schema) -> None:
    """Change the schema of `TrainingJob`: paths are absolute, also those with defaults."""
    properties = schema["properties"]
    properties["folder"].pop("default", None)
    properties["folder"]["pattern"] = _ABSOLUTE
    properties["snapshots"].pop("default", None)
    needed = [*schema.get("required", []), "folder", "snapshots"]
    schema["required"] = [name for name in needed if name not in _OF_MODULES]
    schema["if"] = {"properties": {"script": {"type": "string"}}, "required": ["script"]}
    schema["else"] = {"properties": {name: _NOT_EMPTY for name in ("module", "data")}, "required": _OF_MODULES}
    for arguments in ("module_args", "data_args"):
        properties[arguments]["additionalProperties"] = _NOT_RELATIVE
    properties["args"]["items"] = {**properties["args"]["items"], **_NOT_RELATIVE}


def plugin_schema(schema: Schema) -> None:
    """Change the schema of plugins named by import path: none of their arguments is relative."""
    schema["properties"]["args"]["additionalProperties"] = _NOT_RELATIVE


def file_schema(schema: Schema) -> Schema:
    """Return the job's `schema` for files, where paths can be relative and loggers short.

    Reverses `job_schema`, `snapshots_schema` and `plugin_schema`, in place.
    """
    groups = schema["$defs"]
    for form, optional in ((schema, {"folder", "snapshots"}), (groups["SnapshotOptions"], {"url"})):
        form["required"] = [name for name in form["required"] if name not in optional]
    for path in (schema["properties"]["folder"], groups["SnapshotOptions"]["properties"]["url"]):
        del path["pattern"]
    arguments = [schema["properties"][name] for name in ("module_args", "data_args")]
    schema["properties"]["args"]["items"] = {"type": ["string", "number"]}
    for group in [*arguments, *(groups[name]["properties"]["args"] for name in ("CallbackOptions", "LoggerOptions"))]:
        group["additionalProperties"] = True
    loggers, path = schema["properties"]["loggers"], groups["LoggerOptions"]["properties"]["path"]
    built_in = {"pattern": path["pattern"].split("|^")[0]}
    with_arguments = {"type": "object", "minProperties": 1, "maxProperties": 1, "propertyNames": built_in}
    loggers["items"] = {"anyOf": [path, with_arguments, loggers["items"]]}
    return schema


def switch_schema(schema: Schema) -> None:
    """Change the schema of a group that true and false switch on and off."""
    schema["anyOf"].append({"type": "boolean"})


def whole_schema(schema: Schema) -> None:
    """Change the schema of a share or number: the default null means the whole in a browser."""
    schema["anyOf"].append({"type": "null"})
    schema["default"] = None
