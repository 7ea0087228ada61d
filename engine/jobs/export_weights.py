"""Exports weights: safetensors, torch.export, ONNX, a folder for `from_pretrained`."""

import inspect
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from midstride.engine.errors import UserError
from midstride.engine.formatting import format_names, format_number
from midstride.engine.jobs.evaluate import of_one_process, weights_of
from midstride.engine.modules.module import DataModule, TrainingModule
from midstride.engine.modules.quantized import load_weights
from midstride.engine.runs.run import Run
from midstride.engine.runs.run_report import Report, report_of
from midstride.engine.snapshots.reader import weights_at
from midstride.engine.snapshots.weights import download_tensors, newest_weights
from midstride.engine.storage.draft import draft_of
from midstride.engine.trees import map_leaves

__all__ = ["FORMATS", "export_weights"]


def export_weights(run: Run, kind: str, output: str, weights: str = "best") -> str:
    """Write the weights of a run to `output`; return a sentence about it.

    Args:
        run: a run.
        kind: one of `FORMATS`.
        output: a file; a folder for "hub".
        weights: "best" or "last".

    Raises:
        UserError: the module, or an installed library, does not allow this format.
    """
    try:
        return FORMATS[kind](run, Path(output), weights)
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error.strerror}. Name another place") from error


def _safetensors(run: Run, output: Path, weights: str) -> str:
    found = newest_weights(run.store, weights)
    if found is None:
        raise UserError(
            f"{run.url} has no {weights} weights yet. A monitor in the job saves the best, the end the last"
        )
    with draft_of(output) as draft:
        download_tensors(run.store, found, draft)
    return f"{output}: the {weights} weights, of step {found.position.step}"


def _torch_export(run: Run, output: Path, weights: str) -> str:
    module, arguments, given = _loaded_with_example(run, weights)
    program = torch.export.export(module, arguments, given, dynamic_shapes=_any_batch_size(module, arguments, given))
    torch.testing.assert_close(program.module()(*arguments, **given), module(*arguments, **given))
    with draft_of(output) as draft, draft.open("wb") as file:
        torch.export.save(program, file)
    return f"{output}: load it with torch.export.load({output.name!r}).module(). Its output was compared on one batch"


def _onnx(run: Run, output: Path, weights: str) -> str:
    if missing := [name for name in ("onnx", "onnxscript") if find_spec(name) is None]:
        raise UserError(f"--format onnx needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    module, arguments, given = _loaded_with_example(run, weights)
    shapes = _any_batch_size(module, arguments, given)
    program = torch.onnx.export(module, arguments, kwargs=given, dynamo=True, dynamic_shapes=shapes, verbose=False)
    assert program is not None  # as with every export by dynamo
    with draft_of(output) as draft:
        program.save(draft)
    return f"{output}: open it with onnxruntime.InferenceSession({output.name!r})"


def _hub(run: Run, output: Path, weights: str) -> str:
    _, module, data = of_one_process(run.job)
    named = {"the module": module, **{f"module.{name}": child for name, child in module.named_children()}}
    models = {name: child for name, child in named.items() if callable(getattr(child, "save_pretrained", None))}
    if not models:
        raise UserError(
            f"--format hub needs a model with save_pretrained, as those of transformers have; {run.job.module} holds "
            f"{format_names([type(child).__name__ for child in module.children()])}. Use --format safetensors or pt2"
        )
    name, model = next(iter(models.items()))
    load_weights(module, weights_at(weights_of(run, weights)).complete(module.state_dict))
    output.mkdir(parents=True, exist_ok=True)
    for part in (model, *(getattr(data, name, None) for name in ("tokenizer", "processor", "image_processor"))):
        if callable(save := getattr(part, "save_pretrained", None)):
            save(str(output))
    card = output / "README.md"
    with draft_of(card) as draft:
        draft.write_text(_model_card(report_of(run), weights), encoding="utf-8")
    return f"{output}: open it with {type(model).__name__}.from_pretrained({str(output)!r}); it is {name}"


def _model_card(report: Report, weights: str) -> str:
    """Return a model card: values of the run, and how it was trained."""
    values = {**{f"best {name}": value for name, value in report.best.items()}, **report.test}
    rows = "\n".join(f"| {name} | {format_number(value)} |" for name, value in values.items())
    return (
        f"---\nlibrary_name: transformers\ntags: [midstride]\n---\n\n# {report.job}\n\n"
        f"The {weights} weights of run {report.run}: {report.steps:,} steps in {report.epochs} epochs, "
        f"{report.restarts} restarts.\n\n| metric | value |\n| --- | --- |\n{rows}\n"
    )


def _loaded_with_example(run: Run, weights: str) -> tuple[TrainingModule, tuple[Any, ...], dict[str, Any]]:
    """Return the module with its weights, in evaluation mode, and arguments of its `forward`."""
    _, module, data = of_one_process(run.job)
    if type(module).forward is nn.Module.forward:
        raise UserError(f"{run.job.module} has no forward, which this format exports: define it, or use safetensors")
    load_weights(module, weights_at(weights_of(run, weights)).complete(module.state_dict))
    module.eval()
    arguments, given = _arguments(module, _example_batch(module, data))
    accepted = inspect.signature(module.forward)
    try:
        accepted.bind(*arguments, **given)
        with torch.no_grad():
            module(*arguments, **given)
    except Exception as error:
        raise UserError(
            f"{run.job.module}.forward does not take the first batch of its data: {type(error).__name__}: {error}. Set "
            "example_input_array of the module to the arguments of forward"
        ) from error
    return module, arguments, given


def _example_batch(module: TrainingModule, data: DataModule) -> Any:
    """Return `example_input_array` of the module, else the first evaluation batch of `data`."""
    if (example := getattr(module, "example_input_array", None)) is not None:
        return example
    data.prepare_data()
    stages: dict[str, Callable[[], Any]] = {
        "predict": data.predict_dataloader,
        "test": data.test_dataloader,
        "fit": data.val_dataloader,
    }
    for stage, loaders in stages.items():
        data.setup(stage)
        loader = loaders()
        while isinstance(loader, (list, tuple)) and loader:
            loader = loader[0]
        if loader is not None:
            return next(iter(loader))
    raise UserError("there is no loader to take an example from: set example_input_array of the module")


def _arguments(module: TrainingModule, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a batch as arguments of `forward`: its keys, or as many values as `forward` takes."""
    parameters = inspect.signature(module.forward).parameters.values()
    if isinstance(batch, Mapping):
        takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
        names = {one.name for one in parameters}
        return (), {name: value for name, value in batch.items() if takes_all or name in names}
    if isinstance(batch, (tuple, list)):
        needed = sum(one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD for one in parameters)
        return tuple(batch[:needed]), {}
    return (batch,), {}


def _any_batch_size(module: TrainingModule, arguments: tuple[Any, ...], given: dict[str, Any]) -> Any:
    """Return dynamic shapes: the first dimension of each tensor can be of any size."""
    bound = inspect.signature(module.forward).bind(*arguments, **given).arguments
    return {name: map_leaves(_first_dimension, value) for name, value in bound.items()}


def _first_dimension(value: Any) -> Any:
    return {0: torch.export.Dim.AUTO} if isinstance(value, Tensor) and value.dim() else None


#: value of `--format` -> what writes it
FORMATS: dict[str, Callable[[Run, Path, str], str]] = {
    "safetensors": _safetensors,
    "pt2": _torch_export,
    "onnx": _onnx,
    "hub": _hub,
}
