"""A tree encoded to bytes and decoded again."""

import json
from typing import Any

from safetensors.torch import load, save

from midstride.engine.state.codec import decode, encode


def through_files(tree: Any) -> Any:
    """Take `tree` to the bytes of the two files and back."""
    encoded = encode(tree)
    text, data = json.dumps(encoded.document, allow_nan=False).encode(), save(encoded.tensors)
    return decode(json.loads(text), load(data))
