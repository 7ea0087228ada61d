"""Checks that a user's methods can be called like those of the base class. No torch."""

import inspect
from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any

from midstride.engine.code_origin import module_of

__all__ = ["is_own", "override_faults"]


def is_own(kind: type) -> bool:
    """Whether `kind` is a class of the user's, not one of midstride's."""
    return not module_of(kind).startswith("midstride.")


def override_faults(kind: type, prefix: str = "") -> list[str]:
    """Return a message for each method of `kind` that is missing or has other parameters.

    Parameters that have a default in the base class may be left out.

    Args:
        kind: a class that inherits one of midstride's.
        prefix: how the names begin of the methods to look at; by default all public ones.
    """
    unwritten = sorted(getattr(kind, "__abstractmethods__", ()))
    faults = [f"{kind.__name__} has no {name}: write {name}{_shown(getattr(kind, name))}" for name in unwritten]
    own = {name for base in kind.__mro__ if is_own(base) for name in vars(base)}
    for name in sorted(name for name in own if name.startswith(prefix) and not name.startswith("_")):
        written, inherited = (_first(kind, name, own=True), _first(kind, name, own=False))
        if inspect.isfunction(written) and inspect.isfunction(inherited) and not _accepts(written, inherited):
            where, called = f"{kind.__name__}.{name}{_shown(written)}", f"{name}{_shown(inherited)}"
            faults.append(f"{where} is called as {called}: write it with these parameters")
    return faults


def _first(kind: type, name: str, *, own: bool) -> Any:
    """Return `name` of the first class of a user or of midstride among the bases of `kind`."""
    return next((vars(base)[name] for base in kind.__mro__ if is_own(base) is own and name in vars(base)), None)


def _accepts(written: Callable[..., Any], inherited: Callable[..., Any]) -> bool:
    """Whether `written` takes all arguments of `inherited`, or at least those without a default."""
    signature = inspect.signature(written, follow_wrapped=False)
    parameters = [*inspect.signature(inherited).parameters.values()]
    needed = [one for one in parameters if one.default is one.empty and one.kind is not one.VAR_POSITIONAL]
    return any(_binds(signature, asked) for asked in (parameters, needed))


def _binds(signature: Signature, parameters: list[Parameter]) -> bool:
    named = {one.name: None for one in parameters if one.kind is one.KEYWORD_ONLY}
    try:
        signature.bind(*[None] * (len(parameters) - len(named)), **named)
    except TypeError:
        return False
    return True


def _shown(method: Callable[..., Any]) -> str:
    """Return the parameters of `method` as text, without their types."""
    parameters = inspect.signature(method, follow_wrapped=False).parameters.values()
    return str(Signature([one.replace(annotation=one.empty) for one in parameters]))
