"""Which hook is which does not depend on those that torch registers beside it."""

from torch import nn
from torch.nn.utils import spectral_norm

from midstride.engine.objects.roots import user_hooks

NAMES = ("_forward_pre_hooks", "_forward_hooks")


def own(*_: object) -> None:
    pass


def test_hooks_of_torch_do_not_count() -> None:
    alone, beside = nn.Linear(2, 2), spectral_norm(nn.Linear(2, 2))
    for layer in (alone, beside):
        layer.register_forward_hook(own)
        layer.register_forward_pre_hook(own)
    assert len(beside._forward_pre_hooks) == 2
    assert user_hooks(alone, NAMES) == user_hooks(beside, NAMES)
    assert [*user_hooks(alone, NAMES).values()] == [own, own]
