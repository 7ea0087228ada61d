"""The loggers as rows of data, and how a job or a Trainer names them."""

import re
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, field_validator

from midstride.engine.config.arguments import Arguments, texts_in
from midstride.engine.config.import_paths import IMPORT_PATH, import_path
from midstride.engine.config.json_schema import plugin_schema
from midstride.engine.config.options import Options
from midstride.engine.config.validation import validation_errors
from midstride.engine.storage.urls import holds_password

__all__ = ["LOGGERS", "LoggerOptions", "LoggerSpec", "Loggers", "checked_loggers", "run_name_faults"]


class LoggerSpec(NamedTuple):
    """A logger: its class, required module, extra, and the argument filled with the job's name.

    `reserved` are the characters that its tracker takes in no name of a run.
    """

    path: str
    needs: str
    extra: str
    project: str = ""
    reserved: str = ""


LOGGERS: dict[str, LoggerSpec] = {
    "tensorboard": LoggerSpec("midstride.engine.loggers.tensorboard:TensorBoardLogger", "tensorboard", "tensorboard"),
    "mlflow": LoggerSpec("midstride.engine.loggers.mlflow:MLflowLogger", "mlflow", "mlflow", "experiment"),
    "wandb": LoggerSpec("midstride.engine.loggers.wandb:WandbLogger", "wandb", "wandb", "project", ":;,#?/'"),
}


def _logger_path(path: str) -> str:
    if path in LOGGERS:
        return path
    if ":" not in path:
        raise ValueError(f"unknown logger {path!r}: choose one of {', '.join(LOGGERS)}, or package.module:Class")
    return import_path(path)


class LoggerOptions(Options, json_schema_extra=plugin_schema):
    """A tracker that gets the rows of the metric log, as snapshots with them are committed."""

    path: Annotated[str, AfterValidator(_logger_path)] = Field(
        title="Logger",
        description="tensorboard, mlflow, wandb, or package.module:attribute of a Logger.",
        json_schema_extra={"pattern": f"^({'|'.join(LOGGERS)})$|{IMPORT_PATH}"},
    )
    args: Arguments = Field({}, title="Arguments", description="Keyword arguments of the logger.")
    wait_s: Annotated[float, Field(strict=True, ge=0)] = Field(
        60.0, title="Wait", description="Seconds to wait at the end of the training for a slow or unreachable tracker."
    )

    @field_validator("args")
    @classmethod
    def _without_passwords(cls, args: dict[str, Any]) -> dict[str, Any]:
        for name, text in texts_in(args, "args"):
            if holds_password(text):
                raise ValueError(
                    f"{name} holds a password, which would be stored in the run's folder and shown in reports. Give it "
                    "in the environment, such as MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
                )
        return args

    def in_project(self, name: str) -> Self:
        """Return a logger whose tracker collects runs under `name`, unless it names another."""
        spec = LOGGERS.get(self.path)
        if spec is None or not spec.project:
            return self
        return self.model_copy(update={"args": {spec.project: name, **self.args}})


def _in_full_form(value: Any) -> Any:
    """Return the loggers of a job, each a name with or without arguments, in their full form."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return value
    return tuple(_full_form(one) for one in value)


def _full_form(value: Any) -> Any:
    if isinstance(value, str):
        return {"path": value}
    if isinstance(value, dict) and len(value) == 1:
        [(name, args)] = value.items()
        return {"path": name, "args": args or {}} if name in LOGGERS else value
    return value


Loggers = Annotated[tuple[LoggerOptions, ...], BeforeValidator(_in_full_form)]


class _Group(Options):
    loggers: Loggers


def checked_loggers(loggers: Any) -> tuple[tuple[LoggerOptions, ...], list[str]]:
    """Return a Trainer's loggers, validated, and messages on their faults."""
    try:
        return _Group.model_validate({"loggers": loggers}).loggers, []
    except ValidationError as error:
        return (), validation_errors(error, _Group)


def run_name_faults(loggers: Sequence[LoggerOptions], name: str) -> list[str]:
    """Return messages on which of `loggers` have a tracker that does not take `name` for a run.

    >>> run_name_faults([LoggerOptions(path="wandb")], "lr:0.1")
    ["loggers.0: wandb takes none of :;,#?/' in the name of a run, and this one is 'lr:0.1': name it 'lr-0.1'"]
    """
    faults = []
    for number, options in enumerate(loggers):
        reserved = LOGGERS[options.path].reserved if options.path in LOGGERS else ""
        if reserved and (legal := re.sub(f"[{re.escape(reserved)}]", "-", name.strip())) != name:
            rule = f"takes none of {reserved} in the name of a run"
            if legal == name.strip():
                rule = "takes no name of a run that begins or ends with a space"
            faults.append(f"loggers.{number}: {options.path} {rule}, and this one is {name!r}: name it {legal!r}")
    return faults
