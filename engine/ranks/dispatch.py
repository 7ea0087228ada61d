"""A Trainer's calls, made in every rank of its world, which is started now if no launcher has."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

from midstride.engine.config.lightning_names import ARGUMENTS
from midstride.engine.ranks.multiprocess import Call, run_in_children
from midstride.engine.ranks.subprocess_script import ended_early, start_other_ranks

if TYPE_CHECKING:
    from midstride.engine.training.trainer import Trainer

__all__ = ["in_every_rank"]

Verb = TypeVar("Verb", bound=Callable[..., Any])


def in_every_rank(verb: Verb) -> Verb:
    """Have `verb`, a method of the Trainer, run in every rank."""
    signature = inspect.signature(verb)

    @wraps(verb)
    def started(*given: Any, **named: Any) -> Any:
        try:
            arguments = signature.bind(*given, **named).arguments
        except TypeError as error:
            takes = [name for name in signature.parameters if name != "self"]
            ways = [f"; {name}: {ARGUMENTS[name]}" for name in named if name in ARGUMENTS and name not in takes]
            raise TypeError(f"Trainer.{verb.__name__}({', '.join(takes)}) {error}{''.join(ways)}") from None
        trainer, module, data = arguments.pop("self"), arguments.pop("module"), arguments.pop("data", None)
        start = trainer.placement.start
        if start == "none":
            return verb(trainer, module, data, **arguments)
        if start == "script":
            return _in_script(verb, trainer, module, data, arguments)
        return _in_children(verb, trainer, module, data, arguments)

    return cast("Verb", started)


def _in_script(verb: Any, trainer: "Trainer", module: Any, data: Any, arguments: dict[str, Any]) -> Any:
    start_other_ranks(trainer.placement.ranks, trainer.placement.gpus)
    try:
        return verb(trainer, module, data, **arguments)
    except BaseException as error:
        for line in ended_early():
            error.add_note(line)
        raise


def _in_children(verb: Any, trainer: "Trainer", module: Any, data: Any, arguments: dict[str, Any]) -> Any:
    if verb.__name__ != "fit" and arguments.get("ckpt_path") in ("best", "last"):
        arguments = {**arguments, "ckpt_path": trainer.weights_url(arguments["ckpt_path"])}
    if verb.__name__ == "fit":
        trainer.reset_callbacks()
    module._trainer = []  # this Trainer stays here
    placement = trainer.placement
    mine = {"gpus": placement.gpus, "devices": None} if placement.gpus else {"gpus": 0, "devices": placement.ranks}
    call = Call({**trainer.settings, **mine}, verb.__name__, module, data, arguments)
    ranks = run_in_children(call, placement.ranks, "spawn" if placement.start == "spawn" else "fork")
    ranks[0].to(trainer, module, fitted=verb.__name__ == "fit")
    if verb.__name__ == "predict":
        return [prediction for rank in ranks for prediction in rank.value]
    return ranks[0].value
