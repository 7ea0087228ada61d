"""Runs a call of a Trainer in every rank; starts the ranks if no launcher has started them."""

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import chain
from typing import Any, Protocol, TypeVar, cast

from midstride.engine.config.lightning_names import (
    ARGUMENT_NAMES,
    ARGUMENTS_AFTER,
    LIGHTNING_ARGUMENTS,
    NEUTRAL_ARGUMENTS,
    without_neutral,
)
from midstride.engine.config.options import TrainerOptions
from midstride.engine.config.strategies import FORK_AFTER_CUDA
from midstride.engine.errors import JobError, UserCodeError
from midstride.engine.lightning.adapt import adapt
from midstride.engine.modules.compiled import compile_in_place
from midstride.engine.modules.structure import ModuleStructure
from midstride.engine.ranks.gpus import fork_cannot_use_cuda
from midstride.engine.ranks.multiprocess import TrainerCall, run_in_children
from midstride.engine.ranks.placement import Placement
from midstride.engine.ranks.script_ranks import ended_early, ranks_watched, start_other_ranks
from midstride.engine.session.script_exit import exit_codes_of_errors

__all__ = ["of_loaders", "on_all_ranks"]

DEFAULT_TIMEOUT_S: float = TrainerOptions.model_fields["collective_timeout_s"].default

Verb = TypeVar("Verb", bound=Callable[..., Any])


class StartsRanks(Protocol):
    """The members of a Trainer that are used to start its ranks."""

    #: see `TrainerInterface`
    verb: str
    status: str

    @property
    def placement(self) -> Placement:
        """The placement of the Trainer, with the number of ranks to start."""
        ...

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The arguments of the Trainer's constructor, to build the same Trainer in each rank."""
        ...

    def fitted_module(self, verb: str, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the module and the arguments of a call of the method `verb` without a module."""
        ...

    def start_from(self, module: Any, ckpt_path: Any) -> None:
        """Load the weights that a new run starts from."""
        ...

    def detach(self, module: Any, verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Detach `module` from this Trainer; return the arguments of `verb` for a rank's Trainer."""
        ...

    def export_result(self, built: ModuleStructure) -> dict[str, Any]:
        """Return the changes of a call for `adopt_result`.

        `built` is the module's structure before the call.
        """
        ...

    def adopt_result(self, module: Any, result: Mapping[str, Any], *, fitted: bool) -> None:
        """Take over the `result` that `export_result` of a Trainer in a rank returned."""
        ...


def on_all_ranks(verb: Verb) -> Verb:
    """Decorate `verb`, a method of the Trainer, so that a call of it runs in every rank."""
    signature = inspect.signature(verb)

    @wraps(verb)
    def on_ranks(*given: Any, **named: Any) -> Any:
        arguments = _bound(verb.__name__, signature, given, named)
        trainer: StartsRanks
        trainer, module, data = arguments.pop("self"), arguments.pop("module", None), arguments.pop("data", None)
        if module is None:
            module, arguments = trainer.fitted_module(verb.__name__, arguments)
        module = compile_in_place(module)
        adapt(module)
        adapt(data)
        if verb.__name__ == "fit" and (start_path := arguments.pop("ckpt_path", None)) is not None:
            trainer.start_from(module, start_path)
        start = trainer.placement.start
        try:
            with exit_codes_of_errors(), _call(trainer, verb.__name__):
                if start == "none":
                    return verb(trainer, module, data, **arguments)
                if start == "subprocess":
                    return _in_subprocesses(verb, trainer, module, data, arguments)
                return _in_children(verb, trainer, module, data, arguments)
        except UserCodeError as error:
            raise error.as_instance_of_cause() from error.__cause__

    return cast("Verb", on_ranks)


@contextmanager
def _call(trainer: StartsRanks, verb: str) -> Iterator[None]:
    """Let the Trainer tell its call, and how it ends."""
    trainer.verb, trainer.status = verb, "running"
    try:
        yield
    except BaseException:
        trainer.status = "interrupted"
        raise
    trainer.status = "finished"


def _bound(verb: str, signature: inspect.Signature, given: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name.

    Lightning's names are translated, and its defaults dropped.

    Raises:
        TypeError: they do not fit; the message has the way out.
    """
    takes = [name for name in signature.parameters if name != "self"]
    named = {**_in_their_places(verb, signature, given, named), **named}
    unknown = {name: value for name, value in named.items() if name not in signature.parameters}
    ours = {name: value for name, value in named.items() if name in signature.parameters}
    for name, value in without_neutral(unknown, NEUTRAL_ARGUMENTS).items():
        alias = ARGUMENT_NAMES.get(name, name)
        if alias not in takes:
            alias = name
        if ours.get(alias) is not None and value is not None:
            raise TypeError(f"Trainer.{verb}({alias}=..., {name}=...): both mean the same: give one")
        if value is not None or alias not in takes:
            ours[alias] = value
    try:
        start_path = _take_start_path(ours) if verb == "fit" else {}
        return {**signature.bind(**ours).arguments, **start_path}
    except TypeError as error:
        ways = [f"; {name}: {LIGHTNING_ARGUMENTS[name]}" for name in ours if name in LIGHTNING_ARGUMENTS]
        raise TypeError(f"Trainer.{verb}({', '.join(takes)}) {error}{''.join(ways)}") from None


def _take_start_path(arguments: dict[str, Any]) -> dict[str, Any]:
    """Remove `ckpt_path` from the arguments of a fit; return it if a new run starts from it.

    "last" says what a fit with a run does anyway; without one it stays, and is refused.
    """
    if (path := arguments.get("ckpt_path")) == "last":
        if arguments.get("run") is not None:
            del arguments["ckpt_path"]
        return {}
    return {} if path is None else {"ckpt_path": arguments.pop("ckpt_path")}


def _in_their_places(
    verb: str, signature: inspect.Signature, given: Sequence[Any], named: Mapping[str, Any]
) -> dict[str, Any]:
    """Return positional arguments by name, without None where it is the default.

    Those that only Lightning has follow ours.
    """
    own = [one for one in signature.parameters.values() if one.kind is one.POSITIONAL_OR_KEYWORD]
    names = [*(one.name for one in own), *ARGUMENTS_AFTER[verb]]
    if len(given) > len(names):
        raise TypeError(f"Trainer.{verb}() takes {len(names)} positional arguments, not {len(given)}: name them")
    by_name = dict(zip(names, given, strict=False))
    if isinstance(by_name.get("datamodule"), (str, os.PathLike)):
        raise TypeError(f"Trainer.{verb}: too many positional arguments: name the run: run={by_name['datamodule']!r}")
    if twice := by_name.keys() & named.keys():
        raise TypeError(f"Trainer.{verb}() got multiple values for argument {min(twice)!r}: give it once")
    optional = {one.name for one in own if one.default is None}
    return {name: value for name, value in by_name.items() if value is not None or name not in optional}


def _in_subprocesses(verb: Any, trainer: StartsRanks, module: Any, data: Any, arguments: dict[str, Any]) -> Any:
    start_other_ranks(trainer.placement.ranks, trainer.placement.gpus)
    try:
        with ranks_watched(trainer.arguments.get("collective_timeout_s", DEFAULT_TIMEOUT_S)):
            return verb(trainer, module, data, **arguments)
    except BaseException as error:
        for line in ended_early():
            error.add_note(line)
        raise


def _in_children(verb: Any, trainer: StartsRanks, module: Any, data: Any, arguments: dict[str, Any]) -> Any:
    arguments, placement = trainer.detach(module, verb.__name__, arguments), trainer.placement
    mine = {"gpus": placement.gpus, "devices": None} if placement.gpus else {"gpus": 0, "devices": placement.ranks}
    call = TrainerCall(type(trainer), {**trainer.arguments, **mine}, verb.__name__, module, data, arguments)
    if placement.start == "fork" and placement.gpus:
        _ensure_can_fork(trainer)
    ranks = run_in_children(call, placement.ranks, "spawn" if placement.start == "spawn" else "fork")
    trainer.adopt_result(module, ranks[0].state, fitted=verb.__name__ == "fit")
    if verb.__name__ == "predict":
        return join_ranks([rank.value for rank in ranks])
    return ranks[0].value


def _ensure_can_fork(trainer: StartsRanks) -> None:
    """Refuse ranks on GPUs if this process has used CUDA since the Trainer was made.

    Raises:
        JobError: it has.
    """
    if fork_cannot_use_cuda():
        name = trainer.arguments.get("strategy") or "ddp_notebook"
        raise JobError(FORK_AFTER_CUDA.message.format(strategy=name))


class LoaderPredictions(list[Any]):
    """The predictions of one loader, where there are several."""


def of_loaders(predictions: Sequence[list[Any]]) -> list[Any]:
    """Return one list of predictions per loader; with a single loader, its predictions."""
    return predictions[0] if len(predictions) == 1 else [LoaderPredictions(one) for one in predictions]


def join_ranks(ranks: Sequence[list[Any]]) -> list[Any]:
    """Return the predictions of all ranks, concatenated in the order of ranks for each loader.

    >>> join_ranks([of_loaders([["a", "b"]]), of_loaders([["c"]])])
    ['a', 'b', 'c']
    >>> join_ranks([of_loaders([["a"], ["x"]]), of_loaders([["b"], ["y", "z"]])])
    [['a', 'b'], ['x', 'y', 'z']]
    """
    if any(isinstance(one, LoaderPredictions) for one in ranks[0]):
        return [LoaderPredictions(chain.from_iterable(loader)) for loader in zip(*ranks, strict=True)]
    return list(chain.from_iterable(ranks))
