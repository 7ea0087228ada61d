"""`save_hyperparameters`: the constructor arguments of a module or a DataModule, by name."""

import inspect
from collections.abc import Collection, Mapping
from types import FrameType
from typing import Any

from midstride.engine.errors import UserError

__all__ = ["Hyperparameters", "HyperparametersMixin", "accepted_arguments", "ensure_accepted"]


class Hyperparameters(dict[str, Any]):
    """A dict whose items are also attributes: `hparams["lr"]` is `hparams.lr`."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"unknown hyperparameter {name!r}: choose one of {', '.join(self) or 'none'}")

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        self.__getattr__(name)
        del self[name]


class HyperparametersMixin:
    """Gives a class `save_hyperparameters` and `hparams`."""

    #: the arguments that `save_hyperparameters` saved
    hparams: Hyperparameters

    def save_hyperparameters(self, *names: str, ignore: str | Collection[str] = ()) -> None:
        """Save the arguments of this object's constructor as `self.hparams`; call it in `__init__`.

        `load_from_checkpoint` builds a module from them. If the `__init__` of a derived class called this one, its
        arguments are saved, too; its values win.

        Args:
            names: names to save, also of arguments taken by `**`; all by default.
            ignore: one or several names that are not saved.

        Raises:
            UserError: a name is not an argument.
        """
        given = _arguments(self, inspect.currentframe())
        ignored = {ignore} if isinstance(ignore, str) else {*ignore}
        if unknown := [name for name in names if name not in given]:
            raise UserError(
                f"save_hyperparameters: {unknown[0]!r} is not an argument here: choose from {', '.join(given)}"
            )
        self.hparams = Hyperparameters({name: given[name] for name in names or given if name not in ignored})


def accepted_arguments(kind: type, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of `arguments` that the constructor of `kind` accepts.

    Saved ones can be those of a base class.
    """
    parameters = inspect.signature(kind).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(arguments)
    return {name: value for name, value in arguments.items() if name in parameters}


def ensure_accepted(kind: type, arguments: Mapping[str, Any], path: object) -> None:
    """Raise UserError if `kind` does not accept `arguments`, some saved with weights at `path`."""
    try:
        inspect.signature(kind).bind(**arguments)
    except TypeError as error:
        names = ", ".join(arguments) or "none"
        raise UserError(
            f"{kind.__name__} takes other arguments than those saved in {path} or passed ({names}): {error}.\n"
            "Pass the missing arguments, or load into the class that was trained"
        ) from error


def _arguments(owner: object, frame: FrameType | None) -> dict[str, Any]:
    """Return the arguments by name of `owner`'s constructor calls in `frame` and its callers.

    Raises:
        RuntimeError: no constructor of `owner` is running.
    """
    arguments: dict[str, Any] = {}
    is_called = False
    while frame is not None:
        if frame.f_code.co_name == "__init__":
            names, _, keywords, found = inspect.getargvalues(frame)
            if names and found.get(names[0]) is owner:
                is_called = True
                arguments.update({name: found[name] for name in names[1:] if name in found})
                arguments.update(found[keywords] if keywords else {})
        frame = frame.f_back
    if not is_called:
        raise RuntimeError(f"save_hyperparameters must be called in the __init__ of {type(owner).__name__}")
    return arguments
