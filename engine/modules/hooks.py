"""Hooks of a module and its callbacks, looked up once. Other hooks cost nothing."""

import inspect
import logging
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from midstride.engine.code_origin import is_user_class, is_written_by_user, module_of
from midstride.engine.config.lightning_names import LIGHTNING_HOOKS, REFUSED_BY_LIGHTNING
from midstride.engine.config.overrides import override_faults
from midstride.engine.errors import ReplayEnd, UserCodeError
from midstride.engine.modules.callbacks import Callback
from midstride.engine.modules.module import MODE_HOOKS, DataModule, TrainingModule
from midstride.engine.modules.module_hooks import ModuleHooks
from midstride.engine.user_code import call_user_code

if TYPE_CHECKING:
    from midstride.engine.modules.interface import TrainerInterface

__all__ = ["Hooks", "bind_step_end", "hook_faults", "own_hook"]

log = logging.getLogger(__name__)

_BOTH = "write both, or neither: then attributes that training changes are kept"


class Hooks:
    """Overridden hooks of a module and its callbacks by name, those of callbacks first."""

    def __init__(self, trainer: "TrainerInterface", module: TrainingModule, callbacks: Sequence[Callback]) -> None:
        self._by_name: dict[str, list[tuple[str, Callable[..., Any], tuple[Any, ...]]]] = {}
        self._has_told = False  #: whether `on_exception` was called
        for callback in callbacks:
            for name in _hook_names(Callback):
                if getattr(type(callback), name) is not getattr(Callback, name):
                    self._add(name, callback, (callback.trainer_view(trainer), module))
        for name in _hook_names(ModuleHooks):
            if getattr(type(module), name, None) is not getattr(ModuleHooks, name):
                self._add(name, module, ())

    def _add(self, name: str, owner: object, first: tuple[Any, ...]) -> None:
        row = (f"{type(owner).__name__}.{name}", getattr(owner, name), first)
        self._by_name.setdefault(name, []).append(row)

    def has(self, name: str) -> bool:
        """Return whether the module or a callback overrides the hook `name`."""
        return name in self._by_name

    def bound(self, name: str) -> Sequence[Callable[..., object]]:
        """Return a function for each hook called `name`, in order. A loop looks them up once."""
        return [partial(call_user_code, where, hook, *first) for where, hook, first in self._by_name.get(name, ())]

    def drop_of_libraries(self, names: Sequence[str], is_dropped: Callable[[Callable[..., Any]], bool]) -> None:
        """Remove the hooks `names` of owners whose first one is a library's, if `is_dropped` agrees.

        Args:
            names: the hooks; the first one decides.
            is_dropped: is given a function that calls the first hook with its last argument.
        """
        for where, hook, first in [*self._by_name.get(names[0], ())]:
            owner = getattr(hook, "__self__", None)
            if not is_written_by_user(owner, names[0]) and is_dropped(partial(call_user_code, where, hook, *first)):
                for name in names:
                    rows = self._by_name.get(name, [])
                    self._by_name[name] = [row for row in rows if getattr(row[1], "__self__", None) is not owner]

    def named(self, name: str) -> Sequence[tuple[str, Callable[..., object]]]:
        """Return "Class.hook" and a function for each hook called `name`, in order."""
        return [*zip((where for where, _, _ in self._by_name.get(name, ())), self.bound(name), strict=True)]

    def call(self, name: str, *arguments: Any, of: Literal["all", "module", "callbacks"] = "all") -> None:
        """Call every hook called `name`, or only the module's, or only those of callbacks."""
        for where, hook, first in self._by_name.get(name, ()):
            if of == "all" or (of == "callbacks") == bool(first):
                call_user_code(where, hook, *first, *arguments)

    def call_on_exception(self, error: BaseException, verb: str) -> None:
        """Call `on_exception` once with the error that ends the call `verb`.

        That is the user's own if it is theirs. The end of a replay is no error. Errors in the hooks are logged.
        """
        if self._has_told or isinstance(error, ReplayEnd):
            return
        self._has_told = True
        cause = error.__cause__ if isinstance(error, UserCodeError) and error.__cause__ is not None else error
        try:
            self.call("on_exception", cause)
        except Exception as failed:
            log.warning("%s\nIt was called because %s failed with %s: %s", failed, verb, type(cause).__name__, cause)


def own_hook(owner: object, name: str) -> Callable[..., Any] | None:
    """Return a function that calls the method `name` of `owner`; None if it has no such method.

    The function raises UserCodeError where the method fails.
    """
    hook = getattr(owner, name, None)
    return None if hook is None else partial(call_user_code, f"{type(owner).__name__}.{name}", hook)


def hook_faults(module: TrainingModule, callbacks: Sequence[Callback], data: object) -> list[str]:
    """Return messages on hooks with other parameters or never called, and on one-way states."""
    faults = [fault for callback in callbacks for fault in override_faults(type(callback))]
    faults += override_faults(type(module), "on_")
    owners: list[tuple[object, type, list[str]]] = [(module, TrainingModule, _hook_names(ModuleHooks))]
    owners += [(callback, Callback, _hook_names(Callback)) for callback in callbacks]
    owners += [(data, DataModule, [])] if isinstance(data, DataModule) else []
    for owner, base, known in owners:
        written = {name for kind in type(owner).__mro__ for name in _names_of_hooks(kind)}
        if owner is not module and "state_dict" in written and "load_state_dict" not in written:
            faults.append(f"{type(owner).__name__} has state_dict, but no load_state_dict: {_BOTH}")
        for name in sorted(written - {*dir(base), *MODE_HOOKS}):
            meant = get_close_matches(name, known, n=1, cutoff=0.85)
            way = LIGHTNING_HOOKS.get(name) or (f"write {meant[0]}" if meant else "")
            if way:
                where = f"{type(owner).__name__}.{name}"
                faults.append(f"{where} would never be called: {way}; a helper of your own needs another name")
    return faults


def _names_of_hooks(kind: type) -> Iterable[str]:
    """Return names in a class that can be meant as hooks.

    All of a user's; of other classes those that Lightning refuses.

    A class of a library runs as it is with Lightning, so its other methods are helpers of its own.
    """
    if module_of(kind).partition(".")[0] in ("torch", "torchmetrics", "midstride", "lightning", "pytorch_lightning"):
        return ()
    return vars(kind) if is_user_class(kind) else REFUSED_BY_LIGHTNING & vars(kind).keys()


def bind_step_end(module: TrainingModule, step: str) -> Callable[[Any, Any], Any] | None:
    """Return a function of outputs and batch that calls `<step>_end`; None if not overridden.

    The batch is passed only if the method takes it. There is no `predict_step_end`.
    """
    default = getattr(TrainingModule, f"{step}_end", None)
    if default is None or getattr(getattr(module, f"{step}_end"), "__func__", None) is default:
        return None
    method, where = getattr(module, f"{step}_end"), f"{type(module).__name__}.{step}_end"
    if len(inspect.signature(method).parameters) > 1:
        return lambda outputs, batch: call_user_code(where, method, outputs, batch)
    return lambda outputs, batch: call_user_code(where, method, outputs)


def _hook_names(owner: type) -> list[str]:
    return [name for name in vars(owner) if name.startswith("on_")]
