"""The job's JSON schema, which a Prefect server draws a form from and checks the parameters of a run by.

pydantic writes it; here it gains what a deployed job needs, absolute paths, and the menu of strategies. What ties
choices together stands in Python alone: a run that breaks such a rule is refused when it starts.
"""

from typing import Any

from midstride.engine.config.import_paths import IMPORT_PATH

__all__ = ["class_schema", "file_schema", "job_schema", "plugin_schema", "snapshots_schema", "whole_schema"]

Schema = dict[str, Any]

_ABSOLUTE = "^/"
#: an absolute path or a URL without a password
_STORE_URL = r"^(?![\w+.-]+://[^/]*:[^/]*@)(/|[A-Za-z][\w+.-]*://)"
_NOT_RELATIVE = {"not": {"type": "string", "pattern": r"^\.\.?/"}}


def class_schema(names: list[str]) -> Schema:
    """Return the schema of a strategy or a launcher: one of `names` from a menu, or a class of one's own."""
    return {
        "anyOf": [
            {"title": "Built in", "type": "string", "enum": names},
            {"title": "Your own", "type": "string", "pattern": IMPORT_PATH},
        ]
    }


def snapshots_schema(schema: Schema) -> None:
    """Change the schema of `SnapshotOptions`: the URL is given, and means the same wherever a worker starts."""
    schema["properties"]["url"].pop("default", None)
    schema["properties"]["url"]["pattern"] = _STORE_URL
    schema["required"] = [*schema.get("required", []), "url"]


def job_schema(schema: Schema) -> None:
    """Change the schema of `TrainingJob`: paths are absolute, and those with a default beside its file are given."""
    properties = schema["properties"]
    properties["folder"].pop("default", None)
    properties["folder"]["pattern"] = _ABSOLUTE
    properties["snapshots"].pop("default", None)
    schema["required"] = [*schema.get("required", []), "folder", "snapshots"]
    for arguments in ("module_args", "data_args"):
        properties[arguments]["additionalProperties"] = _NOT_RELATIVE


def plugin_schema(schema: Schema) -> None:
    """Change the schema of what a job names by import path: no path among its arguments is relative."""
    schema["properties"]["args"]["additionalProperties"] = _NOT_RELATIVE


def file_schema(schema: Schema) -> Schema:
    """Return the job's `schema` for files, in which paths can be relative and loggers have a short form.

    Reverses `job_schema`, `snapshots_schema` and `plugin_schema`, in place.
    """
    groups = schema["$defs"]
    for form, optional in ((schema, {"folder", "snapshots"}), (groups["SnapshotOptions"], {"url"})):
        form["required"] = [name for name in form["required"] if name not in optional]
    for path in (schema["properties"]["folder"], groups["SnapshotOptions"]["properties"]["url"]):
        del path["pattern"]
    arguments = [schema["properties"][name] for name in ("module_args", "data_args")]
    for group in [*arguments, *(groups[name]["properties"]["args"] for name in ("CallbackOptions", "LoggerOptions"))]:
        group["additionalProperties"] = True
    loggers, path = schema["properties"]["loggers"], groups["LoggerOptions"]["properties"]["path"]
    built_in = {"pattern": path["pattern"].split("|^")[0]}
    with_arguments = {"type": "object", "minProperties": 1, "maxProperties": 1, "propertyNames": built_in}
    loggers["items"] = {"anyOf": [path, with_arguments, loggers["items"]]}
    return schema


def whole_schema(schema: Schema) -> None:
    """Change the schema of a share or a number: the whole, its default, is null, which no browser takes for a 1."""
    schema["anyOf"].append({"type": "null"})
    schema["default"] = None
