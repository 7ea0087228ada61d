"""Words that stand on disk and on the wire: older runs, servers and scripts hold them, so none may change.

What is found comes from a real run; what it is compared with are literals. A word may be added, with its row here:
readers take what they know. One that goes or changes needs a reader of the old one first.
"""

import json
from collections.abc import Callable

import pytest

from midstride.engine import Callback, EarlyStopping, TrainingModule
from midstride.engine.objects.object_state import Objects
from midstride.engine.seeds import mix
from midstride.engine.state.codec import decode, encode

# --- classes of the engine that a user's module keeps ---------------------------------------------------------------


class Keeping(TrainingModule):
    """Keeps things of the engine's in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.stopper = EarlyStopping("loss")
        self.kind = EarlyStopping
        self.write = self.log
        self.hash: Callable[..., int] = mix
        self.several = [mix, EarlyStopping("loss"), Callback()]
        self.inner = [TrainingModule()]


#: what a snapshot says of them -> what those said that were written when each class went by its file
OLD_KINDS = {
    "midstride.engine:EarlyStopping": "midstride.engine.callbacks:EarlyStopping",
    "midstride.engine:Callback": "midstride.engine.callbacks:Callback",
    "midstride.engine:TrainingModule": "midstride.engine.module:TrainingModule",
    "midstride.engine:TrainingModule.log": "midstride.engine.module:TrainingModule.log",
    "midstride.engine:mix": "midstride.engine.seeds:mix",
}


@pytest.mark.parametrize("kinds", [{}, OLD_KINDS], ids=["new", "old"])
def test_a_class_of_the_engine_may_move(kinds: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    trained, resumed = Keeping(), Keeping()
    objects = Objects.of_module(trained), Objects.of_module(resumed)
    trained.inner[0].hparams["width"] = 3
    caplog.clear()
    encoded = encode(objects[0].state_dict())
    text = json.dumps(encoded.document)
    for new, old in kinds.items():
        assert f'"{new}"' in text
        text = text.replace(f'"{new}"', f'"{old}"')
    objects[1].load_state_dict(decode(json.loads(text), encoded.tensors))
    assert resumed.inner[0].hparams == {"width": 3}
    assert caplog.messages == []
