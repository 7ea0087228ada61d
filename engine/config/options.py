"""The choices a Trainer and a job share, validated in one place, with titles for forms.

Importing this needs no torch: an orchestrator reads jobs without loading it.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from numbers import Integral
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from midstride.engine.config.json_schema import (
    duration_schema,
    snapshots_schema,
    switch_schema,
    whole_schema,
)
from midstride.engine.config.validation import validation_errors
from midstride.engine.errors import JobError
from midstride.engine.storage.store import StoreOptions
from midstride.engine.storage.urls import PASSWORD, holds_password, url_fault

__all__ = [
    "LONG_PRECISIONS",
    "BadSampleOptions",
    "CompileOptions",
    "GateOptions",
    "IdentityOption",
    "MonitorOptions",
    "NightlyOptions",
    "Options",
    "Place",
    "Record",
    "SnapshotOptions",
    "TrainerOptions",
    "checked_options",
    "short_precision",
]

#: options that decide which samples make a step, and what a step is
IdentityOption = Literal[
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "val_check_interval",
    "check_val_every_n_epoch",
    "limit_train_batches",
    "limit_val_batches",
    "use_distributed_sampler",
    "rng",
]


def _is_whole(value: object) -> bool:
    return isinstance(value, float) and value == 1.0


#: The whole, 1.0, is null in JSON: what passes through a browser, as a form of a deployment does, comes back as 1, a
#: number of batches.
Whole = (
    Field(union_mode="left_to_right", json_schema_extra=whole_schema),
    BeforeValidator(lambda value: 1.0 if value is None else value),
    PlainSerializer(lambda value: None if _is_whole(value) else value, when_used="json"),
)
Fraction = Annotated[float, Field(strict=True, gt=0.0, le=1.0)]
Count = Annotated[int, Field(ge=1, strict=True)]
#: a step or a range of steps
StepRange = Annotated[
    str, BeforeValidator(lambda value: str(value) if type(value) is int else value), Field(pattern=r"^\d+(-\d+)?$")
]
Limit = Annotated[
    Annotated[int, Field(ge=0, strict=True)] | Annotated[float, Field(strict=True, ge=0.0, le=1.0)], *Whole
]


#: Lightning's name of a precision -> the short one
LONG_PRECISIONS = {"16-mixed": "16", "bf16-mixed": "bf16", "32-true": "32", "64-true": "64"}


def short_precision(value: Any) -> Any:
    """Return the short name of a precision: 16 and "16-mixed" are "16".

    >>> short_precision("bf16-mixed")
    'bf16'
    """
    return LONG_PRECISIONS.get(str(value), str(value)) if type(value) in (int, str) else value


def _none_if_minus_one(value: object) -> object:
    """Return None for -1, with which Lightning says that there is no limit."""
    return None if value == -1 else value


def _seconds(value: Any) -> Any:
    """Return a duration in seconds: a number, "DD:HH:MM:SS", a timedelta, or its arguments.

    >>> _seconds("00:08:00:00"), _seconds({"hours": 8})
    (28800.0, 28800.0)
    """
    if isinstance(value, str) and (found := re.fullmatch(r"(\d+):(\d\d):(\d\d):(\d\d)", value.strip())):
        value = dict(zip(("days", "hours", "minutes", "seconds"), map(int, found.groups()), strict=True))
    if isinstance(value, Mapping):
        try:
            value = timedelta(**value)
        except TypeError:
            return value
    return value.total_seconds() if isinstance(value, timedelta) else value


def _none_if_zero(value: object) -> object:
    """Return None for 0, with which Lightning says that nothing is clipped."""
    return None if type(value) in (int, float) and value == 0 else value


class Record(BaseModel):
    """Base of documents: unknown keys are errors, and values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Options(Record):
    """Base of every group of choices; their numbers are finite."""

    model_config = ConfigDict(allow_inf_nan=False)


def _checked_place(place: str, info: ValidationInfo) -> str:
    """Return `place`. Refuse an unset variable or half a URL: it would become a folder's name."""
    if fault := url_fault(place):
        raise ValueError(fault)
    if found := re.search(r"\$[A-Za-z_]\w*|\$?\{.*?\}+", place):
        key = "snapshots.url" if info.field_name == "url" else info.field_name
        raise ValueError(
            f'{found[0]} is not expanded here: write the value, or let the shell expand it, as in --set {key}="..."'
        )
    return place


#: of a folder, or a URL
Place = Annotated[str, AfterValidator(_checked_place)]


def _without_password(url: str) -> str:
    if holds_password(url):
        raise ValueError(PASSWORD)
    return url


class SnapshotOptions(Options):
    """Times and place of a run's snapshots."""

    model_config = ConfigDict(json_schema_extra=snapshots_schema)

    url: Annotated[str, Field(min_length=1), AfterValidator(_checked_place), AfterValidator(_without_password)] = Field(
        "runs", title="Store", description="Folder or fsspec URL that holds the runs."
    )
    credentials: Annotated[str, Field(pattern=r"^([a-z0-9-]+/)?[a-z0-9-]+$")] | None = Field(
        None,
        title="Credentials",
        description="Prefect block with the store's credentials: secret/NAME or aws-credentials/NAME. If empty, "
        "they come from the environment.",
    )
    lease: Literal["exclusive", "none"] = Field(
        "exclusive",
        title="Lease",
        description="exclusive: only one attempt can advance a run. none: you ensure that, on any fsspec URL.",
    )
    store_patience_s: Annotated[float, Field(strict=True, ge=0)] = Field(
        300.0, title="Patience", description="Seconds to wait for a store that does not answer."
    )
    every_steps: Count | None = Field(
        None, title="Every n steps", description="Steps between snapshots; during a validation, batches."
    )
    every_seconds: Annotated[float, Field(strict=True, gt=0)] | None = Field(
        None, title="Every t seconds", description="Seconds between snapshots."
    )
    overhead: Fraction | None = Field(
        None,
        title="Overhead",
        description="Largest share of the training time for snapshots; 0.01 if no interval is set.",
    )
    keep: Count = Field(3, title="Keep", description="Number of newest snapshots to keep; older ones are removed.")
    archive_every_steps: Count | None = Field(
        None,
        title="Archive every n steps",
        description="Keep the first snapshot of each this many steps for good, to replay and fork.",
    )

    @property
    def store_options(self) -> StoreOptions:
        """Store options of a world that trains."""
        return StoreOptions(self.lease, self.store_patience_s)

    @model_validator(mode="after")
    def _one_rhythm(self) -> "SnapshotOptions":
        chosen = [name for name in ("every_steps", "every_seconds", "overhead") if getattr(self, name) is not None]
        if len(chosen) > 1:
            raise ValueError(f"choose one of every_steps, every_seconds and overhead, not {' and '.join(chosen)}")
        return self


class MonitorOptions(Options):
    """The logged value that decides which weights are best."""

    metric: str = Field(title="Metric", description="Name under which the value is logged, such as val/accuracy.")
    mode: Literal["min", "max"] = Field("min", title="Better is", description="min for a loss, max for a score.")
    patience: Count | None = Field(
        None, title="Patience", description="Stop after this many validations without an improvement; never if empty."
    )


class GateOptions(Options):
    """Limits of one test value. A challenger outside of them is not promoted."""

    min: float | None = Field(None, title="Minimum", description="Smallest allowed value.")
    max: float | None = Field(None, title="Maximum", description="Largest allowed value.")
    max_drop: Annotated[float, Field(strict=True, ge=0)] | None = Field(
        None, title="Largest drop", description="Largest drop below the champion's value; 0 allows none."
    )
    max_rise: Annotated[float, Field(strict=True, ge=0)] | None = Field(
        None, title="Largest rise", description="Largest rise above the champion's value; 0 allows none."
    )


class NightlyOptions(Options):
    """Conditions for a night's challenger to replace the champion."""

    metric: str | None = Field(
        None,
        title="Metric",
        description="Test value to compare. If empty, the monitor's: test/loss for val/loss.",
    )
    margin: Annotated[float, Field(strict=True, ge=0)] = Field(
        0.0, title="Margin", description="The challenger must be better by more than this, in units of the metric."
    )
    gates: dict[str, GateOptions] = Field(
        {}, title="Gates", description="Test value -> min, max, max_drop, max_rise. All must hold for a promotion."
    )
    warm_start: bool = Field(False, title="Warm start", description="Start each night from the champion's weights.")


class BadSampleOptions(Options):
    """Limit of unreadable training samples to leave out."""

    skip: Count = Field(title="Skip", description="Largest number of different samples that are left out in a run.")


class CompileOptions(Options):
    """Arguments of `torch.compile`."""

    backend: str = Field("inductor", title="Backend", description="Compiler that torch uses.")
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = Field(
        None, title="Mode", description="With max-autotune, another attempt can choose other kernels."
    )
    fullgraph: bool = Field(False, title="Full graph", description="Refuse code that breaks the graph.")
    dynamic: bool | None = Field(None, title="Dynamic", description="Compile for any shapes; by default when needed.")
    options: dict[str, Any] | None = Field(None, title="Options", description="Options of the backend, without a mode.")

    @model_validator(mode="after")
    def _has_mode_or_options(self) -> "CompileOptions":
        if self.mode is not None and self.options is not None:
            raise ValueError("torch.compile takes mode or options: leave one out")
        return self


def _compile_options(value: Any) -> Any:
    """Return {} for True, and None for False."""
    return {True: {}, False: None}[value] if isinstance(value, bool) else value


class TrainerOptions(Options):
    """Length and manner of a training."""

    max_epochs: Annotated[Count | None, BeforeValidator(_none_if_minus_one)] = Field(
        None, title="Epochs", description="Stop after this many passes over the data."
    )
    max_steps: Annotated[Count | None, BeforeValidator(_none_if_minus_one)] = Field(
        None, title="Steps", description="Stop after this many optimizer steps."
    )
    min_epochs: Count | None = Field(
        None, title="At least epochs", description="Passes over the data before early stopping can end the training."
    )
    min_steps: Count | None = Field(
        None,
        title="At least steps",
        description="Optimizer steps before early stopping may end the training; without min_epochs, one epoch, too.",
    )
    max_time: Annotated[Annotated[float, Field(gt=0)] | None, BeforeValidator(_seconds)] = Field(
        None,
        title="Seconds",
        description="Stop after this time in training, over all attempts: seconds, or DD:HH:MM:SS.",
        json_schema_extra=duration_schema,
    )
    precision: Annotated[Literal["32", "bf16", "16", "64"], BeforeValidator(short_precision)] = Field(
        "32", title="Precision", description="Floating-point precision; 16 and bf16 are mixed precision."
    )
    accumulate_grad_batches: Count = Field(1, title="Accumulate", description="Number of batches per optimizer step.")
    gradient_clip_val: Annotated[Annotated[float, Field(strict=True, gt=0)] | None, BeforeValidator(_none_if_zero)] = (
        Field(None, title="Clip gradients", description="Largest norm (or value) of the gradients.")
    )
    gradient_clip_algorithm: Literal["norm", "value"] = Field("norm", title="Clip by", description="Norm or value.")
    on_nan: Literal["fail", "skip"] = Field(
        "fail",
        title="A loss that is not finite",
        description="fail: end the run. skip: leave the batch out on every rank and list it in the report.",
    )
    verify_every: Count | None = Field(
        None,
        title="Verify every n steps",
        description="Execute every n-th step twice and compare, to find machines that compute wrongly; never if empty.",
    )
    skip_batches: tuple[StepRange, ...] = Field(
        (),
        title="Skip batches",
        description="Steps whose batches are left out, such as 4810-4830, as counted without this key.",
    )
    skip_samples: tuple[Annotated[int, Field(ge=0, strict=True)], ...] = Field(
        (), title="Skip samples", description="Indices of samples of the training data that are left out of batches."
    )
    bad_samples: BadSampleOptions | None = Field(
        None,
        title="Samples that cannot be read",
        description="Leave out up to this many samples of the training data whose reading raises an error; if empty, "
        "the first one ends the run.",
    )
    val_check_interval: Annotated[Count | Fraction, *Whole] = Field(
        1.0,
        title="Validate every",
        description="Share of an epoch (0.5) or number of batches (100) between validations; a whole epoch if empty.",
    )
    check_val_every_n_epoch: Count | None = Field(
        1,
        title="Validate in every n-th epoch",
        description="Validate in every n-th epoch. If empty, val_check_interval counts batches across epochs.",
    )
    limit_train_batches: Limit = Field(
        1.0, title="Limit training", description="Share of the batches (0.1) or number of them (10); all if empty."
    )
    limit_val_batches: Limit = Field(1.0, title="Limit validation", description="The same, of each validation loader.")
    limit_test_batches: Limit = Field(1.0, title="Limit test", description="The same, of each test loader.")
    limit_predict_batches: Limit = Field(
        1.0, title="Limit prediction", description="The same, of each prediction loader."
    )
    overfit_batches: Annotated[
        Annotated[int, Field(ge=0, strict=True)] | Annotated[float, Field(strict=True, ge=0.0, le=1.0)],
        Field(union_mode="left_to_right"),
    ] = Field(
        0, title="Overfit", description="Train and validate on this share or number of batches, without shuffling."
    )
    rng: Literal["lazy", "batch"] = Field(
        "lazy",
        title="Random numbers in data",
        description="lazy: a seed for each sample. batch: one for a whole batch.",
    )
    use_distributed_sampler: bool = Field(
        True,
        title="Shard samplers",
        description="Give each rank its own share of the samples.",
        validation_alias=AliasChoices("use_distributed_sampler", "replace_sampler_ddp"),  # Lightning 1's name
    )
    deterministic: bool | None = Field(
        None, title="Deterministic", description="Use only deterministic algorithms; by default if snapshots are on."
    )
    compile: Annotated[CompileOptions | None, BeforeValidator(_compile_options)] = Field(
        None,
        title="Compile",
        description="Compile the calls of the module and its layers: true, or arguments.",
        json_schema_extra=switch_schema,
    )
    benchmark: bool | None = Field(
        None,
        title="Benchmark",
        description="Let cuDNN measure which algorithms are fastest. With snapshots, deterministic must be false.",
    )
    detect_anomaly: bool = Field(
        False, title="Detect anomalies", description="Name the operation whose gradient is NaN; slow."
    )
    collective_timeout_s: Annotated[float, Field(strict=True, ge=1)] = Field(
        600.0,
        title="Collective time-out",
        description="Seconds that the ranks wait in training for a silent one before they end.",
    )
    enable_progress_bar: bool = Field(True, title="Progress bar", description="Show a progress bar on a terminal.")

    @model_validator(mode="before")
    @classmethod
    def _overfits(cls, values: Any) -> Any:
        share = values.get("overfit_batches") if isinstance(values, Mapping) else None
        return {**values, "limit_train_batches": share, "limit_val_batches": share} if share else values

    @model_validator(mode="after")
    def _at_least_is_no_more_than_at_most(self) -> "TrainerOptions":
        for name in ("epochs", "steps"):
            least, most = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if least is not None and most is not None and least > most:
                raise ValueError(
                    f"min_{name} is {least}, and max_{name} {most}: the training ends before that. Raise max_{name}"
                )
        return self

    @model_validator(mode="after")
    def _counts_batches_over_epochs(self) -> "TrainerOptions":
        if self.check_val_every_n_epoch is None and isinstance(self.val_check_interval, float):
            raise ValueError(
                "check_val_every_n_epoch is null (None), which counts batches across epochs: give their number, such "
                f"as val_check_interval=100, not {self.val_check_interval}"
            )
        return self

    @property
    def least_epochs(self) -> int:
        """Epochs before the fit may be stopped; with `min_steps` alone it is one, as in Lightning."""
        return int(self.min_steps is not None) if self.min_epochs is None else self.min_epochs

    @model_validator(mode="after")
    def _clips_by_what_is_given(self) -> "TrainerOptions":
        if self.gradient_clip_algorithm == "value" and self.gradient_clip_val is None:
            raise ValueError("gradient_clip_algorithm is value, and nothing is clipped: set gradient_clip_val")
        return self


def _seed_errors(seed: object) -> list[str]:
    fits = type(seed) is not bool and isinstance(seed, Integral) and abs(int(seed)) < 1 << 63
    return [] if fits else [f"seed: should be a whole number below 2**63, not {seed!r}"]


def checked_options(
    options: dict[str, Any],
    snapshots: SnapshotOptions | Mapping[str, Any] | None,
    seed: object,
    others: Sequence[str],
    where: str = "Trainer(...)",
) -> tuple[TrainerOptions, SnapshotOptions | None]:
    """Return the arguments of a Trainer or Loop, validated.

    Args:
        options: fields of `TrainerOptions`.
        snapshots: those of `SnapshotOptions`.
        seed: what generators of Python, numpy and torch are to be seeded with.
        others: faults found elsewhere, to raise together.
        where: the call, in the message.

    Raises:
        JobError: with every fault at once.
    """
    faults = [*others, *_seed_errors(seed)]
    checked: list[Any] = []
    for group, kind, given in (("", TrainerOptions, options), ("snapshots", SnapshotOptions, snapshots)):
        try:
            values = dict(given) if isinstance(given, Mapping) else given
            checked.append(given if given is None or isinstance(given, kind) else kind.model_validate(values))
        except ValidationError as error:
            faults += validation_errors(error, kind, group)
    endless = options.get("max_epochs") == -1  # until it is stopped
    ends = None if faults else (checked[0].max_epochs, checked[0].max_steps, checked[0].max_time)
    if ends == (None, None, None) and not endless:
        checked[0] = checked[0].model_copy(update={"max_epochs": 1000})
    if faults:
        raise JobError.of(where, faults)
    return checked[0], checked[1]
