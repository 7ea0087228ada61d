"""Runs Lightning's own tests on midstride's Trainer: a pytest plugin that counts passes, and failures by reason.

`make test-lightning LIGHTNING=path` names a checkout. Tests that mock, or look inside the Trainer, are left out. Those
that fail for a known reason are skipped, so that what fails is news.
"""

import inspect
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.utilities import imports

from midstride.engine import Trainer

#: code of tests that cannot apply: mocks, loops, connectors, strategies, processes, files of checkpoints and loggers
INSIDE = re.compile(
    r"[Mm]ock|monkeypatch|_loop\b|_connector|\.strategy\b|trainer\._|plugins|precision_plugin|\.ckpt|last_model_path|"
    r"checkpoint_callback|\.loggers?\b|profiler|progress_bar_callback|caplog|MisconfigurationException|KeyboardInterrupt|"
    r"RunIf\(min_cuda|standalone=True|sanity|torch\.jit|onnx|accelerator=\"(gpu|mps|tpu|hpu)|val_progress|isolate_rng"
)
#: reason -> words, as a pattern, of "name of the test, class of the error: its text"; the first that matches counts
_REASONS = {
    "expects a warning or a message in Lightning's words": (
        r"DID NOT WARN|DID NOT RAISE|Regex pattern did not match|raises_when_accumulate|test_.*invalid|"
        r"_raises?\b|_raises?_|test_.*errors_runtime|wrong\b|test_log_invalid|test_validate_precision_type|non_iterables|none_dataloader|"
        r"scheduler_with_extra_keys|fallback|test_early_stopping_reasons|test_fit_multiple_train_loaders.sequential|"
        r"invalid_gradient_clip|error_when_input_not|when_lightning_module_is_not_set"
    ),
    "needs another Lightning than is installed": r"keyword argument '(filter_keys|log_key_prefix)'|ImportError",
    "a callback of Lightning's own that is refused, with the way out": r"needs internals of Lightning's Trainer",
    "another way is needed, which the refusal names": (
        r"no counterpart\. Those of|on_train_batch_start returned -1|takes dataloader_iter|strategy is a \w+ of|"
        r"is unknown|reload_dataloaders|no loss for|the training loader has no batch|StrategyUnavailable|"
        r"optimizer_idx|asked to stop|Lightning's value|has no counterpart|configure_optimizers returned None"
    ),
    "no folder without run=: no checkpoints, no log_dir": (
        r"'NoneType' object has no attribute 'dirpath'|test_log_dir|on_save_checkpoint_called|model_checkpoint"
    ),
    "validate and test return a dict": (
        r"test_eval_epoch|multi_dataloaders_add_suffix|no_dataloader_idx|_validation_step_"
    ),
    "looks inside the Trainer or its callbacks": (
        r"has no (attribute|num_test_batches|precision_plugin)|DistributedSampler|namespace\(|SchedulerConfig\(|"
        r"trainer\.callbacks|FixedCallbacks|'\w+' object has no attribute|model_summary|call_count|is optimizer\._|"
        r"cannot pickle|LightningSGD|test_set_devices_if_none_cpu|accumulate_grad_batches_with_callback|"
        r"object of type 'NoneType' has no len|random_sampler_overfit_batches"
    ),
    "a monitor keeps the newest rates, not all": r"test_lr_monitor|log_momentum",
    "optimizers step after the backward pass, and gradients are zeroed after the step": r"test_train_loop_system",
    "draws random numbers in another order": r"test_overfit_batches_same_batch",
    "lists of batches are no loaders": r"test_prediction_loop_with_iterable_dataset",
    "evaluations run under no_grad, not inference_mode": r"is_inference_mode_enabled",
    "values of logger=False are in logged_metrics, too": r"test__training_step__",
    "a Timer without duration, or of no time at all": r"test_timer",
}
_counts: Counter[str] = Counter()


def pytest_configure(config: pytest.Config) -> None:
    """Put midstride's Trainer in the place of Lightning's, before tests import it."""
    config.addinivalue_line("markers", "flaky: of a plugin that may be missing")
    for version in ("2_9", "2_10", "2_11", "2_12", "2_13"):  # which a newer checkout asks for
        vars(imports).setdefault(f"_TORCH_GREATER_EQUAL_{version}", True)
    for home in (pl, pl.trainer, pl.trainer.trainer):
        vars(home)["Trainer"] = Trainer


def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    """Leave out the tests that cannot apply."""
    kept = [item for item in items if not _looks_inside(item)]
    _counts["left out"] = len(items) - len(kept)
    items[:] = kept


def _looks_inside(item: Any) -> bool:
    source = inspect.getsource(inspect.unwrap(item.function))
    return "Trainer(" not in source or INSIDE.search(source) is not None


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Iterator[None]:
    """Count the outcome of a test."""
    outcome: Any = yield
    report = outcome.get_result()
    if report.when != "call" and report.outcome != "failed":
        return
    if report.outcome == "failed" and (reason := reason_of(f"{item.name} {call.excinfo.exconly()}")):
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, reason)
        _counts[reason] += 1
    else:
        _counts[report.outcome] += 1


def reason_of(text: str) -> str | None:
    """Return why a test does not pass, by its name and error; None if that is not known."""
    return next((reason for reason, words in _REASONS.items() if re.search(words, text)), None)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Write the counts, the largest first."""
    for reason, count in _counts.most_common():
        terminalreporter.write_line(f"{count:5}  {reason}")
