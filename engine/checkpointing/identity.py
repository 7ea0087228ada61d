"""Changes between two attempts of a run, and how they are handled.

kind      what                                              if it differs
identity  module, data, their arguments, seed, global       an error with both values, unless accepted by name
          batch size, precision, strategy, and all else
          that decides the samples of a step
bits      world size, threads, CPU, GPU, versions,          a warning with both values
          deterministic algorithms
source    the user's code, by Python module                 a warning that names the modules
free      workers, launcher, retries, snapshots, patience,  nothing
          a larger max_epochs or max_steps
"""

import argparse
import dataclasses
import functools
import inspect
import json
import platform
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from midstride.engine.errors import IdentityChanged, UserError
from midstride.engine.formatting import format_value
from midstride.engine.objects.kinds.functions import digest_of_code
from midstride.engine.objects.user_modules import functions_of, names_in, user_modules
from midstride.engine.session.replay_plan import recorded_changes

__all__ = [
    "FREE_ARGUMENTS",
    "check_environment",
    "check_identity",
    "check_recorded",
    "environment_changes",
    "environment_of",
    "identity_changes",
    "identity_of",
    "is_json",
    "source_changes",
    "source_digests",
]

#: bytes of an array whose values are compared
_SMALL_BYTES = 1 << 12
#: keys of the environment that decide how sums are computed
_SUM_KEYS = ("threads", "cpu", "machine", "gpu", "cuda", "torch", "compiled")
#: arguments of a data module that are not part of the identity; the global batch size is compared instead
FREE_ARGUMENTS = frozenset({"batch_size", "num_workers", "pin_memory", "prefetch_factor", "persistent_workers"})


def is_json(value: object) -> bool:
    """Return whether JSON keeps `value`, unlike tuples, NaN, and dicts with int keys."""
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError):
        return False


def identity_of(value: object) -> Any:
    """Return `value` after a round trip through JSON.

    Other values become their fields, or the name of their type. Keys of unsupported types are left out, with
    their values.
    """
    try:
        return json.loads(json.dumps(value, default=_described, sort_keys=True))
    except TypeError:  # keys of several types have no order
        return json.loads(json.dumps(value, default=_described, skipkeys=True))


def _described(value: Any) -> Any:
    """Return the fields or the text of a value that JSON does not know; else its class."""
    with suppress(Exception):  # such as a value of a DictConfig that is missing
        return _fields_of(value)
    return type(value).__qualname__


def _fields_of(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    if isinstance(value, argparse.Namespace | types.SimpleNamespace):
        return dict(vars(value))
    if isinstance(value, functools.partial):
        return {"func": value.func, "args": value.args, "keywords": value.keywords}
    return _text_of(value) or _items_of(value) or type(value).__qualname__


def _text_of(value: Any) -> str | None:
    kind = type(value).__qualname__
    if isinstance(value, PurePath | Enum | Fraction | Decimal | range):
        return f"{kind} {value}"
    if isinstance(value, Tensor | np.ndarray | np.generic) and value.nbytes <= _SMALL_BYTES:
        return f"{kind} {value.tolist()}"
    return None


def _items_of(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    return list(value) if isinstance(value, Sequence) else None


def environment_of(user_code: Collection[type], device: torch.device) -> dict[str, Any]:
    """Return versions, hardware and source digests of `user_code`, which may change last bits."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    xla = sys.modules.get("torch_xla")
    return {
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "gpu": gpu,
        "cuda": torch.version.cuda,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **({} if xla is None else {"torch_xla": xla.__version__}),
        "numpy": np.__version__,
        "source": source_digests(user_code),
    }


def identity_changes(saved: dict[str, Any], running: dict[str, Any]) -> dict[str, str]:
    """Return key -> text with both values, for keys of `running` that differ in `saved`.

    1 and 1.0 differ, since as limits they mean one batch and all batches.
    """
    return {
        key: f"the snapshot has {format_value(key, saved.get(key))}, this run has {format_value(key, value)}"
        for key, value in running.items()
        if saved.get(key) != value or type(saved.get(key)) is not type(value)
    }


def check_identity(saved: dict[str, Any], running: dict[str, Any], *, where: str, accepted: Collection[str]) -> None:
    """Check that a snapshot has the identity of the running fit, except for keys in `accepted`.

    Raises:
        IdentityChanged: they differ; the message has all differences, and how to continue.
    """
    lines = {key: line for key, line in identity_changes(saved, running).items() if key not in accepted}
    if not lines:
        return
    changed = list(lines)
    accept = " ".join(f"--accept-change {key}" for key in changed)
    raise IdentityChanged(
        "\n".join(
            [
                f"this is not the run that {where} belongs to:",
                *(f"  {key}: {line}" for key, line in lines.items()),
                "to resume exactly: start it with the snapshot's values",
                f"to go on anyway:   {accept}  (accept_change={changed!r} in a script)",
                "to start over:     another run name",
            ]
        )
    )


def check_environment(saved: dict[str, Any], running: dict[str, Any], *, where: str, accepted: Collection[str]) -> None:
    """Check that sums are computed as in the snapshot, which a run with lanes promises.

    Raises:
        IdentityChanged: they are not, and `accepted` lacks "bits"; the message has all differences.
    """
    if not (changed := [key for key in _SUM_KEYS if saved.get(key) != running.get(key)]) or "bits" in accepted:
        return
    lines = [f"  {key}: the snapshot has {saved.get(key)!r}, this run has {running.get(key)!r}" for key in changed]
    raise IdentityChanged(
        "\n".join(
            [
                f"with lanes, a run resumed from {where} has the bits of an undisturbed one, but here they could "
                f"differ:",
                *lines,
                "to resume exactly: start it on processes like those of the snapshot",
                "to go on anyway:   --accept-change bits  (accept_change=['bits'] in a script)",
            ]
        )
    )


def check_recorded(recorded: dict[str, Any], running: dict[str, Any]) -> None:
    """Check that a replay has the versions, the hardware and the code of its run.

    Raises:
        UserError: it has not; the message has all differences.
    """
    if lines := recorded_changes(recorded, running):
        changed = "\n".join(f"  {line}" for line in lines)
        raise UserError(
            f"the run was trained in another environment, so its bits may not come back:\n{changed}\n"
            "to replay it all the same: --anyway"
        )


def environment_changes(saved: dict[str, Any], running: dict[str, Any]) -> list[str]:
    """Return warnings on changed source code, and on changes that may affect last bits."""
    lines = [
        f"{key} was {saved.get(key)!r} and is {running[key]!r}: sums may differ in their last bits from here on"
        for key in running
        if key != "source" and saved.get(key) != running[key]
    ]
    return [*lines, *source_changes(saved["source"], running["source"])]


def source_digests(kinds: Collection[type]) -> dict[str, str]:
    """Return name -> digest of each of the user's modules that the classes `kinds` use.

    For a module without a file, such as a notebook, the digests are of the classes and functions that `kinds` use.
    """
    code: dict[str, str] = {}
    for module in user_modules(kinds):
        try:
            code[_name(module)] = inspect.getsource(module)
        except (OSError, TypeError, ValueError, SyntaxError):  # no file, a deleted one, or an unknown encoding
            code.update(_interactive_code(module, kinds))
    return {name: xxhash.xxh3_64_hexdigest(found.encode()) for name, found in code.items()}


def _name(module: types.ModuleType) -> str:
    """Return the name by which a module is imported, also if it runs as `__main__`."""
    return Path(module.__file__ or "").stem if module.__name__ == "__main__" else module.__name__


def _interactive_code(module: types.ModuleType, kinds: Iterable[type]) -> Iterator[tuple[str, str]]:
    """Yield name and code of classes and functions of `module` that `kinds` refer to.

    Directly or indirectly.
    """
    here, found = vars(module), set[str]()
    queue: list[type | types.FunctionType] = [*kinds]
    while queue:
        one = queue.pop()
        if one.__module__ != module.__name__ or one.__qualname__ in found:
            continue
        found.add(one.__qualname__)
        functions = [*functions_of(one)]
        yield one.__qualname__, "".join(digest_of_code(function.__code__) for function in functions)
        named = [here.get(name) for function in functions for name in names_in(function.__code__)]
        queue += [value for value in named if isinstance(value, type | types.FunctionType)]
        queue += one.__bases__ if isinstance(one, type) else ()


def source_changes(saved: Mapping[str, str], running: Mapping[str, str]) -> list[str]:
    """Return a warning on modules whose code has changed since the snapshot, or [].

    Modules that only one of them has are ignored: the module that refers to them has changed as well.
    """
    if not (changed := sorted(name for name in running if saved.get(name, running[name]) != running[name])):
        return []
    return [
        f"the code of {', '.join(changed)} has changed since the snapshot was taken: the run continues with the new "
        "code. If this is not intended, restore the old code, or start another run"
    ]
