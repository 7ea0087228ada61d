"""The job as a form: what its JSON schema says beyond single fields.

A Prefect server checks the parameters of a run by their schema, before the run is made; a rule that only Python knows
would make a run that fails at once. So the rules that tie choices together stand here as well, and what a deployed job
needs: absolute paths. They are written as if/then, which a server's message leads to the field by, and without
`required` inside a condition: Prefect removes that word when it checks a part of the parameters.
"""

from typing import Any

from midstride.engine.config.import_paths import IMPORT_PATH
from midstride.engine.config.strategies import STRATEGIES, Choice, Row, conflicts

__all__ = ["choose_strategy", "job_form", "snapshots_form", "world_form"]

Schema = dict[str, Any]

_ABSOLUTE = "^/"
#: an absolute path or a URL without a password
_PLACE = r"^(?![\w+.-]+://[^/]*:[^/]*@)(/|[A-Za-z][\w+.-]*://)"
_NOT_RELATIVE = {"not": {"type": "string", "pattern": r"^\.\.?/"}}
_NULL = {"type": "null"}
_PRECISIONS = ("32", "bf16", "16", "64")
_WORDS = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}

_SNAPSHOTS: Schema = {  # the url holds anywhere; one rhythm
    "required": ["url"],
    "properties": {"url": {"pattern": _PLACE}},
    "if": {"properties": {"every_steps": _NULL}},
    "then": {"if": {"properties": {"every_seconds": _NULL}}, "else": {"properties": {"overhead": _NULL}}},
    "else": {"properties": {"every_seconds": _NULL, "overhead": _NULL}},
}


def choose_strategy(names: list[str]) -> Schema:
    """Return the schema of a strategy: one of `names` from a menu, or a class of one's own."""
    return {
        "anyOf": [
            {"title": "Built in", "type": "string", "enum": names},
            {"title": "Your own", "type": "string", "pattern": IMPORT_PATH},
        ]
    }


def snapshots_form(schema: Schema) -> None:
    """Take from the schema of `SnapshotOptions` a default that holds beside a job's file only."""
    schema["properties"]["url"].pop("default", None)


def world_form(schema: Schema) -> None:
    """Add to the schema of `WorldOptions` what each strategy and launcher goes together with."""
    rules = [_if("launcher", "inline", _properties(processes={"maximum": 1}))]
    for name, row in STRATEGIES.items():
        rules.append(_if("strategy", name, {"allOf": _strategy_rules(name, row)}, default="single"))
    own = {"if": _properties(launcher={"not": {"const": "horovodrun"}}), "then": _properties(hosts=_NULL)}
    rules.append({"if": _properties(strategy={"not": {"pattern": ":"}}), "else": own})
    _add(schema, rules)


def job_form(schema: Schema) -> None:
    """Add to the schema of `TrainingJob`: it ends, its paths hold anywhere, strategy and precision go together."""
    properties = schema["properties"]
    properties["folder"].pop("default", None)
    properties["folder"]["pattern"] = _ABSOLUTE
    properties["snapshots"].pop("default", None)
    schema["required"] = [*schema.get("required", []), "folder", "snapshots"]
    for arguments in ("module_args", "data_args"):
        properties[arguments]["additionalProperties"] = _NOT_RELATIVE
    ends = {
        "if": _properties(max_epochs=_NULL),
        "then": {**_properties(max_steps={"type": "integer"}), "required": ["max_steps"]},
    }
    rules = [_properties(trainer=ends), _properties(snapshots={"if": _NULL, "else": _SNAPSHOTS})]
    for name in STRATEGIES:
        ranks = 2 if conflicts(Choice(name)) else 1  # some strategies cannot be at all in one process
        allowed = [one for one in _PRECISIONS if not conflicts(Choice(name, precision=one, ranks=ranks))]
        if len(allowed) < len(_PRECISIONS):
            precise = _properties(trainer=_properties(precision={"enum": allowed}))
            rules.append(
                {"if": _properties(world=_properties(strategy={"not": {"const": name}})), "else": precise}
                if name != "single"
                else {"if": _properties(world=_properties(strategy={"const": name})), "then": precise}
            )
    _add(schema, rules)


def _strategy_rules(name: str, row: Row) -> list[Schema]:
    """What a world with this strategy has to be like."""
    rules = [_properties(strategy_args=_options(row))]
    at = [bool(conflicts(Choice(name, ranks=ranks))) for ranks in (1, 2, 3)]
    if at == [False, True, True]:
        rules.append(_without_options(_properties(processes={"maximum": 1})))
    elif at == [True, False, False]:
        rules.append(_without_options(_properties(processes={"minimum": 2})))
    if not row.splits:
        rules.append(_properties(devices=_NULL))
    if row.launcher == "horovodrun":
        rules.append(_properties(launcher={"enum": [None, "horovodrun"]}))
    else:
        rules.append(_properties(launcher={"enum": [None, "inline", "spawn", "torchrun"]}, hosts=_NULL))
    return rules


def _options(row: Row) -> Schema:
    """The schema of a strategy's own arguments."""
    wanted = {name: _option(kind) for name, kind in row.options.items()}
    return {"properties": wanted, "additionalProperties": False}


def _option(kind: type | tuple[str | type, ...]) -> Schema:
    if isinstance(kind, type):
        return {"type": _WORDS[kind]} if kind in _WORDS else {}
    values: Schema = {"enum": [value for value in kind if isinstance(value, str)]}
    types = [_option(other) for other in kind if isinstance(other, type)]
    return {"anyOf": [values, *types]} if types else values


def _without_options(rule: Schema) -> Schema:
    """Ask for `rule` where no argument of the strategy may have changed it."""
    return {"if": _properties(strategy_args={"maxProperties": 0}), "then": rule}


def _if(key: str, value: str, rule: Schema, *, default: str | None = None) -> Schema:
    """Ask for `rule` where `key` is `value`; a key that is left out is `default`."""
    if value == default:
        return {"if": _properties(**{key: {"const": value}}), "then": rule}
    return {"if": _properties(**{key: {"not": {"const": value}}}), "else": rule}


def _properties(**properties: Schema) -> Schema:
    return {"properties": properties}


def _add(schema: Schema, rules: list[Schema]) -> None:
    """Ask for all `rules`: out of sight of forms, which would show an `allOf` of an object as a choice."""
    schema["if"], schema["then"] = {}, {"allOf": rules}
