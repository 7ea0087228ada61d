"""What tells functions of one name apart, such as two lambdas that one method makes: their code."""

import types
from functools import lru_cache
from typing import Any

import xxhash

__all__ = ["code_digest", "digest_of_code"]


def code_digest(function: types.FunctionType) -> str | None:
    """Return a digest of the code of a function that other functions may share their name with; else None.

    Where it stands in its file does not count, nor what it closes over.
    """
    if "<" not in function.__qualname__:
        return None
    return digest_of_code(function.__code__)


@lru_cache(maxsize=1024)  # asked at every snapshot
def digest_of_code(code: types.CodeType) -> str:
    """Return a digest of `code`, alike in every process and wherever in its file it stands."""
    return xxhash.xxh3_64_hexdigest(repr(_content(code)).encode())


def _content(constant: Any) -> Any:
    if isinstance(constant, types.CodeType):
        code = constant
        named = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        return (code.co_code, named, code.co_flags, [_content(inner) for inner in code.co_consts])
    if isinstance(constant, frozenset):  # whose order differs from process to process
        return sorted(repr(_content(item)) for item in constant)
    return [_content(item) for item in constant] if isinstance(constant, tuple) else constant
