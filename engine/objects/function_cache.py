"""Functions that cache their results (`functools.cache`, `lru_cache`): no snapshot holds these."""

import functools
import gc
from typing import Any

import numpy as np
from torch import Tensor

from midstride.engine.code_origin import is_user_file

__all__ = ["Cached", "describe_cache", "is_users_cache"]

#: the class of such a function
Cached: Any = type(functools.cache(int))
#: types of results that may depend on more than the arguments, as of a function that draws random numbers
_NUMBERS = (Tensor, np.ndarray, np.generic, float)


def describe_cache(cached: Any) -> str:
    """Describe a cached function by the number of results that it has computed, if the cached ones are numbers."""
    kept = gc.get_referents(cached)  # Python shows them to its collector alone
    results = [item for one in kept for item in (one.values() if type(one) is dict else [one])]
    number = cached.cache_info().misses if any(isinstance(result, _NUMBERS) for result in results) else 0
    return f"{number} results cached"


def is_users_cache(value: Any) -> bool:
    """Return whether `value` is a cached function of the user's."""
    code = getattr(value.__wrapped__, "__code__", None) if isinstance(value, Cached) else None
    return code is not None and is_user_file(code.co_filename)
