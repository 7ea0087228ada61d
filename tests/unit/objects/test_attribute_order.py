"""The order of attributes in snapshots of earlier versions, which wrote them by name."""

from types import SimpleNamespace
from typing import Any

from midstride.engine import TrainingModule
from midstride.engine.objects.object_state import Objects
from midstride.engine.state.object_nodes import Instance


class Summing(TrainingModule):
    def __init__(self) -> None:
        super().__init__()
        self.totals = SimpleNamespace(c=1, a=2)


def by_name(tree: Any) -> Any:
    """Return a tree of state as earlier versions wrote it: attributes by name."""
    if isinstance(tree, Instance):
        tree.state = by_name(tree.state)
    return {key: by_name(tree[key]) for key in sorted(tree)} if isinstance(tree, dict) else tree


def test_attributes_that_stand_by_name_stay_in_the_order_in_which_they_are_built() -> None:
    trained, resumed = Summing(), Summing()
    objects = Objects.of_module(trained), Objects.of_module(resumed)
    trained.totals.b = trained.totals.c = 4
    objects[1].load_state_dict(by_name(objects[0].state_dict()))
    assert [*vars(resumed.totals).items()] == [("c", 4), ("a", 2), ("b", 4)]
