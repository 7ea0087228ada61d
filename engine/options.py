"""The choices a Trainer and a job share, validated in one place, with titles for forms.

Importing this needs no torch: an orchestrator reads jobs without loading it.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from midstride.engine.errors import JobError

__all__ = ["MonitorOptions", "Options", "SnapshotOptions", "TrainerOptions", "checked_options"]

Fraction = Annotated[float, Field(gt=0.0, le=1.0)]
Count = Annotated[int, Field(ge=1, strict=True)]
Limit = Annotated[
    Annotated[int, Field(ge=0, strict=True)] | Annotated[float, Field(ge=0.0, le=1.0)],
    Field(union_mode="left_to_right"),
]


class Options(BaseModel):
    """Base of every group of choices: unknown keys are faults, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class SnapshotOptions(Options):
    """When the whole state of a run is written, and where."""

    url: str = Field("runs", title="Store", description="Folder or fsspec URL that holds the runs.")
    every_steps: Count | None = Field(
        None, title="Every n steps", description="Steps between snapshots; in validation, batches between them."
    )
    every_seconds: Annotated[float, Field(gt=0)] | None = Field(
        None, title="Every t seconds", description="Seconds between snapshots."
    )
    overhead: Fraction | None = Field(
        None,
        title="Overhead",
        description="Largest share of the time that snapshots may cost; 0.01 if nothing is chosen.",
    )
    keep: Count = Field(3, title="Keep", description="How many snapshots are kept; older ones are removed.")

    @model_validator(mode="after")
    def _one_rhythm(self) -> "SnapshotOptions":
        chosen = [name for name in ("every_steps", "every_seconds", "overhead") if getattr(self, name) is not None]
        if len(chosen) > 1:
            raise ValueError(f"choose one of every_steps, every_seconds and overhead, not {' and '.join(chosen)}")
        return self


class MonitorOptions(Options):
    """Which logged value decides what is best."""

    metric: str = Field(title="Metric", description="Name under which the value is logged, such as val/accuracy.")
    mode: Literal["min", "max"] = Field("min", title="Better is", description="min for a loss, max for a score.")
    patience: Count | None = Field(
        None, title="Patience", description="Stop after so many validations without an improvement; never if empty."
    )


class TrainerOptions(Options):
    """How long and how a module trains."""

    max_epochs: Count | None = Field(None, title="Epochs", description="Stop after so many passes over the data.")
    max_steps: Count | None = Field(None, title="Steps", description="Stop after so many optimizer steps.")
    precision: Literal["32", "bf16", "16", "64"] = Field("32", title="Precision", description="Of the arithmetic.")
    accumulate_grad_batches: Count = Field(1, title="Accumulate", description="Batches that make one optimizer step.")
    gradient_clip_val: Annotated[float, Field(gt=0)] | None = Field(
        None, title="Clip gradients", description="Largest norm (or value) of the gradients."
    )
    gradient_clip_algorithm: Literal["norm", "value"] = Field("norm", title="Clip by", description="Norm or value.")
    val_check_interval: Annotated[Count | Fraction, Field(union_mode="left_to_right")] = Field(
        1.0, title="Validate every", description="A share of an epoch (0.5) or a number of batches (100)."
    )
    limit_train_batches: Limit = Field(1.0, title="Limit training", description="A share of the batches or a number.")
    limit_val_batches: Limit = Field(1.0, title="Limit validation", description="A share of the batches or a number.")
    limit_test_batches: Limit = Field(1.0, title="Limit test", description="A share of the batches or a number.")
    use_distributed_sampler: bool = Field(True, title="Shard samplers", description="Give each rank its own samples.")
    deterministic: bool | None = Field(
        None, title="Deterministic", description="Only repeatable algorithms; on when snapshots are on."
    )
    enable_progress_bar: bool = Field(True, title="Progress bar", description="Show one on a terminal.")


def checked_options(
    options: dict[str, Any], snapshots: SnapshotOptions | Mapping[str, Any] | None
) -> tuple[TrainerOptions, SnapshotOptions | None]:
    """Return a Trainer's arguments, validated.

    Raises:
        JobError: with every fault of both groups at once.
    """
    faults: list[str] = []
    checked: list[Any] = []
    for kind, given in ((TrainerOptions, options), (SnapshotOptions, snapshots)):
        try:
            checked.append(given if given is None or isinstance(given, kind) else kind.model_validate(dict(given)))
        except ValidationError as error:
            known = ", ".join(kind.model_fields)
            for fault in error.errors():
                where = ".".join(str(part) for part in fault["loc"][:1]) or "snapshots"
                hint = f"; there are: {known}" if fault["type"] == "extra_forbidden" else ""
                faults.append(f"{where}: {fault['msg']}, not {fault['input']!r}{hint}")
    if not faults and checked[0].max_epochs is None and checked[0].max_steps is None:
        checked[0] = checked[0].model_copy(update={"max_epochs": 1000})
    if faults:
        raise JobError.of("Trainer(...)", faults)
    return checked[0], checked[1]
