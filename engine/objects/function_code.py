"""A digest of a function's code, to tell functions of the same name apart, such as two lambdas of one method."""

import types
from functools import lru_cache
from typing import Any

import xxhash

__all__ = ["code_digest", "digest_of_code"]


def code_digest(function: types.FunctionType) -> str | None:
    """Return a digest of the code of a function whose name may not be unique; None if it is unique.

    The digest does not depend on line numbers or on the values in the closure.
    """
    if "<" not in function.__qualname__:
        return None
    return digest_of_code(function.__code__)


@lru_cache(maxsize=1024)  # asked at every snapshot
def digest_of_code(code: types.CodeType) -> str:
    """Return a digest of `code` that is the same in every process and for any position in its file."""
    return xxhash.xxh3_64_hexdigest(repr(_content(code)).encode())


def _content(constant: Any) -> Any:
    if isinstance(constant, types.CodeType):
        code = constant
        named = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        return (code.co_code, named, code.co_flags, [_content(inner) for inner in code.co_consts])
    if isinstance(constant, frozenset):  # whose order differs from process to process
        return sorted(repr(_content(item)) for item in constant)
    return [_content(item) for item in constant] if isinstance(constant, tuple) else constant
