"""Predictions of a run's weights, written into one file as columns."""

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from midstride.engine.errors import UserError
from midstride.engine.jobs.evaluate import of_one_process, weights_of
from midstride.engine.runs.run import Run
from midstride.engine.storage.draft import draft_of

__all__ = ["FORMATS", "columns_of", "predict"]

Columns = dict[str, "np.ndarray[Any, Any]"]

#: of an output that has no name of its own
_NAME = "prediction"


def predict(run: Run, output: str, weights: str | None = None) -> dict[str, Any]:
    """Predict with a run's weights and write the outputs of `predict_step` in order.

    Args:
        run: a run.
        output: a file; its suffix is one of `FORMATS`.
        weights: as for `evaluate`.

    Returns:
        {"rows": number of samples, "columns": their names}

    Raises:
        UserError: the outputs do not fit into columns, or the format needs a missing library.
    """
    write = FORMATS[Path(output).suffix]
    if write is _write_parquet and find_spec("pyarrow") is None:
        raise UserError(f"{output} needs pyarrow, which is not installed: pip install pyarrow, or write .csv or .npz")
    trainer, module, data = of_one_process(run.job)
    predictions = trainer.predict(module, data, ckpt_path=weights_of(run, weights))
    tables = [columns_of(batches) for batches in _by_loader(predictions)]
    columns = tables[0] if len(tables) == 1 else _joined(tables)
    try:
        with draft_of(Path(output)) as draft:
            write(draft, columns)
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error.strerror}. Name another file") from error
    return {"rows": _rows(columns), "columns": list(columns)}


def _by_loader(predictions: list[Any]) -> list[list[Any]]:
    """Return the outputs of each loader; a list of texts or numbers is the output of a batch."""
    first = next(iter(predictions), None)
    several = isinstance(first, list) and not (first and isinstance(first[0], (str, int, float)))
    return predictions if several else [predictions]


def columns_of(batches: Iterable[Any]) -> Columns:
    """Return the outputs of batches by name, joined along their first dimension.

    A mapping gives a column for each key, a tuple or list of tensors one for each place, a tensor one alone.

    Raises:
        UserError: a value is neither tensor, array, number nor list of texts; or names or lengths differ.
    """
    parts: dict[str, list[np.ndarray[Any, Any]]] = {}
    for number, batch in enumerate(batches):
        named = _named(batch)
        if parts and named.keys() != parts.keys():
            raise UserError(
                f"predict_step returned {', '.join(parts)} at first, and {', '.join(named)} for batch {number}: return "
                "the same names for each batch"
            )
        rows = {name: _array(value, name) for name, value in named.items()}
        if len({len(array) for array in rows.values()}) > 1:
            sizes = ", ".join(f"{len(array)} of {name}" for name, array in rows.items())
            raise UserError(
                f"predict_step returned columns of unequal length for batch {number}: {sizes}. Return "
                f"one row per sample in each"
            )
        for name, array in rows.items():
            parts.setdefault(name, []).append(array)
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}


def _named(batch: Any) -> dict[str, Any]:
    if isinstance(batch, Mapping):
        return {str(name): value for name, value in batch.items()}
    if isinstance(batch, (tuple, list)) and batch and not isinstance(batch[0], (str, int, float)):
        return {f"{_NAME}_{place}": value for place, value in enumerate(batch)}
    return {_NAME: batch}


def _array(value: Any, name: str) -> "np.ndarray[Any, Any]":
    """Return `value` as an array with one row for each sample; a number is one row."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        array = (value.float() if value.dtype is torch.bfloat16 else value).numpy()
    else:
        array = np.asarray(value)
    if array.dtype == object:
        kind = type(value).__name__
        raise UserError(f"predict_step returned a {kind} for {name}: return tensors, arrays, numbers or texts")
    return np.atleast_1d(array)


def _joined(tables: Sequence[Columns]) -> Columns:
    """Return the columns of several loaders as one table, with each row's `loader`."""
    if any(table.keys() != tables[0].keys() for table in tables):
        raise UserError("predict_step returns other names for one loader than for another: predict them one by one")
    loader = np.concatenate([np.full(_rows(table), number) for number, table in enumerate(tables)])
    return {"loader": loader, **{name: np.concatenate([table[name] for table in tables]) for name in tables[0]}}


def _rows(columns: Columns) -> int:
    return max((len(column) for column in columns.values()), default=0)


def _flat(columns: Columns) -> dict[str, list[Any]]:
    """Return columns of single values: an array of (rows, k) becomes k columns.

    More dimensions are refused.
    """
    flat = {}
    for name, column in columns.items():
        if column.ndim > 2:
            raise UserError(f"{name} has the shape {column.shape}, too many dimensions for a table: write .npz")
        if column.ndim == 1:
            flat[name] = column.tolist()
        else:
            flat |= {f"{name}_{place}": column[:, place].tolist() for place in range(column.shape[1])}
    return flat


def _write_csv(path: Path, columns: Columns) -> None:
    flat = _flat(columns)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(flat)
        writer.writerows(zip(*flat.values(), strict=True))


def _write_parquet(path: Path, columns: Columns) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(_flat(columns)), path)


def _write_npz(path: Path, columns: Columns) -> None:
    with path.open("wb") as file:
        save: Any = np.savez  # whose stub takes no names
        save(file, **columns)


#: suffix -> what writes such a file
FORMATS: dict[str, Callable[[Path, Columns], None]] = {
    ".csv": _write_csv,
    ".npz": _write_npz,
    ".parquet": _write_parquet,
}
