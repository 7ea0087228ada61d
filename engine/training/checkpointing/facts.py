"""Facts of a fit that manifests record: the identity of its run, its environment, and metadata of its weights."""

from typing import Any, get_args

from midstride.engine.config.options import IdentityOption
from midstride.engine.modules.monitors import BestCheckpoint
from midstride.engine.training.checkpointing.identity import FREE_ARGUMENTS, environment_of, identity_of, is_json
from midstride.engine.training.checkpointing.roots import classes_of
from midstride.engine.training.checkpointing.text_order import text_order_facts
from midstride.engine.training.context import FitContext

__all__ = ["hyperparameters", "run_facts", "weights_facts"]


def run_facts(context: FitContext) -> dict[str, Any]:
    """Return the run's "identity", and "bits", the environment that may change its last bits; every rank calls this."""
    given = dict(context.settings.identity)
    arguments = given.pop("data_args", {})
    options, order = context.options, context.collective.broadcast(context.loaders.training.order_identity())
    if (batch_size := order.pop("global_batch_size", None)) is not None:
        order["global_batch_size"] = batch_size * options.accumulate_grad_batches
    identity = {
        "module": _module_path(context),
        "module_args": context.module.hparams,
        "data": type(context.source).__qualname__,
        **given,
        "data_args": {key: value for key, value in arguments.items() if key not in FREE_ARGUMENTS},
        "seed": context.settings.seed,
        **order,
        **{name: getattr(options, name) for name in get_args(IdentityOption)},
        "precision": options.precision,
        "strategy": context.strategy.identity,
    }
    bits = environment_of(classes_of(context), context.device)
    return {"identity": identity_of(identity), "bits": bits, **text_order_facts()}


def hyperparameters(context: FitContext) -> dict[str, Any]:
    """Return "hparams": hyperparameters for trackers that are not in the identity, of the data and of loggers."""
    saved = {} if context.source is context.module else getattr(context.source, "hparams", {})
    found = {**({"data_args": dict(saved)} if saved else {}), **context.metric_logger.hparams}
    return {"hparams": identity_of(found)} if found else {}


def weights_facts(context: FitContext) -> dict[str, Any]:
    """Return metadata of weights; snapshots repeat it, so that a lost weights folder can be restored from them."""
    module, progress = context.module, context.progress
    return {
        "step": progress.step,
        "epoch": progress.epoch,
        "module": _module_path(context),
        "hparams": {name: value for name, value in module.hparams.items() if is_json(value)},
        "hparams_left_out": [name for name, value in module.hparams.items() if not is_json(value)],
        "metrics": {name: float(value) for name, value in context.metric_logger.values.items()},
        "monitors": [one.watched for one in context.callbacks if isinstance(one, BestCheckpoint)],
    }


def _module_path(context: FitContext) -> str:
    kind = type(context.module)
    return f"{kind.__module__}:{kind.__qualname__}"
