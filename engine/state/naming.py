"""Names and paths of the values of a state, for messages."""

from midstride.engine.formatting import format_count

__all__ = ["joined", "kind_of", "unwritable"]


def unwritable(faults: list[str]) -> str:
    """Return the message for values that cannot be written, each named with its path."""
    shown = [*faults[:20], *([f"and {len(faults) - 20} more"] if len(faults) > 20 else [])]
    return "\n  ".join([f"{format_count(len(faults), 'value')} of the state cannot be written:", *shown]) + (
        "\nGive whatever holds such a value a state_dict() that returns tensors and plain values only, "
        "and a load_state_dict() that rebuilds the rest."
    )


def joined(path: str, key: object) -> str:
    """Return the path of the item `key` of the value at `path`."""
    text = str(key)
    text = text if len(text) <= 80 else f"{text[:77]}..."
    return f"{path}/{text}" if path else text


def kind_of(value: object) -> str:
    """Return the class of a value, or the name of a function, as messages write it: `function digits.<lambda>`."""
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    own = getattr(value, "__qualname__", None)
    return f"{name} {getattr(value, '__module__', '?')}.{own}" if own else name
