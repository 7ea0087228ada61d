"""Hooks that user code registers on modules and optimizers: snapshots hold their state, but not which exist."""

import logging
import types
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from midstride.engine.code_origin import is_user_class, is_user_file
from midstride.engine.formatting import format_names
from midstride.engine.objects.plain_values import kind_name

__all__ = ["RegisteredHooks", "user_hooks"]

log = logging.getLogger(__name__)


def user_hooks(owner: object, names: Sequence[str]) -> dict[str, Any]:
    """Return the hooks of `owner` that are user code, by the name under which they are registered.

    They are numbered without torch's own hooks, whose number differs between attempts.
    """
    registered = [(name, hook) for name in names for hook in (getattr(owner, name, None) or {}).values()]
    theirs = [(name, hook) for name, hook in registered if _is_user_hook(hook)]
    return {f"{name}_{number}": hook for number, (name, hook) in enumerate(theirs)}


def _is_user_hook(hook: Any) -> bool:
    function = getattr(hook, "__func__", hook)
    if isinstance(function, types.FunctionType):
        return is_user_file(function.__code__.co_filename)
    return is_user_class(type(function))


class RegisteredHooks:
    """Warns of hooks that training registers or removes: a resumed run has those that it is built with.

    Args:
        hooks: by the path of their owner, and by where they are registered, when training begins.
    """

    def __init__(self, hooks: Mapping[str, Mapping[str, Any]]) -> None:
        self._before = _hook_counts(hooks)
        self._reported: set[str] = set()

    def compare(self, hooks: Mapping[str, Mapping[str, Any]]) -> None:
        """Warn, once, of each difference between `hooks` and those that training began with."""
        now = _hook_counts(hooks)
        lines = [
            *(f"{name} is new" for name in now - self._before),
            *(f"{name} is gone" for name in self._before - now),
        ]
        if lines := [line for line in lines if line not in self._reported]:
            self._reported.update(lines)
            log.warning(
                "training changed what hooks there are, and no snapshot holds that: %s. A resumed run has those it is "
                "built with: register them in __init__ or setup and let an attribute decide what they do, or do it "
                "again in on_load_checkpoint",
                format_names(lines),
            )


def _hook_counts(hooks: Mapping[str, Mapping[str, Any]]) -> Counter[str]:
    """Return how often each hook is registered under each name; the order does not count."""
    return Counter(
        f"{_kind(hook)} in {path.removeprefix('hooks').strip('/') or 'the module'}.{name.rpartition('_')[0].strip('_')}"
        for path, owned in hooks.items()
        for name, hook in owned.items()
    )


def _kind(hook: Any) -> str:
    function = getattr(hook, "__func__", hook)
    kind = f"{function.__module__}:{function.__qualname__}" if isinstance(function, types.FunctionType) else None
    return kind or kind_name(type(hook))
