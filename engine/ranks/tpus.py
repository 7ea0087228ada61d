"""Parses `tpu_cores`, without importing torch_xla."""

from typing import Any

__all__ = ["parse_tpu_cores"]

#: of one machine, by which Lightning's `tpu_cores` counts
_CORES = 8


def parse_tpu_cores(tpu_cores: Any) -> tuple[int, int | None]:
    """Return the number of cores that `tpu_cores` selects, and the index of the core if it names one, else None.

    Args:
        tpu_cores: 1 or 8 for so many, as a number or as text, or a list with the index of one.

    Raises:
        ValueError: `tpu_cores` is not understood.

    >>> parse_tpu_cores("8"), parse_tpu_cores([5])
    ((8, None), (1, 5))
    """
    if type(tpu_cores) in (int, str) and str(tpu_cores).strip() in ("1", str(_CORES)):
        return int(tpu_cores), None
    if isinstance(tpu_cores, (list, tuple)) and len(tpu_cores) == 1:
        (core,) = tpu_cores
        if type(core) is int and 0 <= core < _CORES:
            return 1, core
    raise ValueError(
        f"tpu_cores={tpu_cores!r} names no cores of a TPU: 1 or {_CORES} of them are needed, or a list with the index "
        f"of one, [0] to [{_CORES - 1}]; for another number of cores say strategy='xla' and devices"
    )
