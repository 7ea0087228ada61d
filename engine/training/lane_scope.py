"""What surrounds a lane of a batch: its random numbers, what it logs, and that it leaves nothing else behind."""

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from midstride.engine.data.rng.fast_state import seed_generators
from midstride.engine.errors import NotExact
from midstride.engine.metrics.lane_logger import LaneLogger
from midstride.engine.objects.graph import GraphWalk
from midstride.engine.objects.object_state import module_anchors, module_roots
from midstride.engine.seeds import mix
from midstride.engine.state.differences import differences
from midstride.engine.training.context import EvaluationContext

__all__ = ["LaneScope"]

_STAGES = {"train": 0, "validate": 1, "test": 2, "predict": 3}


class LaneScope:
    """Runs steps of one stage lane by lane; random numbers are functions of the lane and of where the run stands.

    Args:
        context: of a strategy with lanes.
        stage: "train", "validate", "test" or "predict".
    """

    def __init__(self, context: EvaluationContext, stage: str) -> None:
        assert context.lanes is not None
        assert isinstance(context.metric_logger, LaneLogger)
        self._context, self._lanes, self._logged = context, context.lanes, context.metric_logger
        self._seed = mix(context.settings.seed, _STAGES[stage])
        self._name = (
            f"{stage if stage in ('test', 'predict') else 'training' if stage == 'train' else 'validation'}_step"
        )
        self._run = 0

    @contextmanager
    def lane(self, lane: int, *position: int) -> Iterator[None]:
        """Run `lane` within, of the batch at `position`.

        Raises:
            NotExact: the step has changed the module's attributes, which are of the rank and not of the lane.
        """
        self._reseed(*position, lane)
        self._run += 1
        # What a first step leaves, such as tensors that it keeps for the others, is there at the second.
        with self._logged.lane(lane), self._unchanged() if self._run == 2 else nullcontext():
            yield

    def leave(self, *position: int) -> None:
        """Let what is drawn after the batch at `position`, by hooks and callbacks, be alike on every rank."""
        self._reseed(*position, self._lanes.count)

    def _reseed(self, *position: int) -> None:
        seed = reduce(mix, position, self._seed)
        seed_generators(seed)
        device = self._context.device
        if device.type == "cuda":
            torch.cuda.default_generators[device.index or 0].manual_seed(seed)

    def _unchanged(self) -> AbstractContextManager[None]:
        return _unchanged(self._context.module, self._name)


@contextmanager
def _unchanged(module: Any, step: str) -> Iterator[None]:
    before = _attributes(module)
    yield
    if paths := differences(before, _attributes(module)):
        shown = ", ".join(path.strip("/").replace("//", "/") for path in paths[:3])
        raise NotExact(
            f"{type(module).__name__}.{step} changes {shown}: with lanes a rank runs it once for each of its lanes, "
            "and how many those are must decide nothing. Log the value, keep it in a buffer or a metric, or change it "
            "in a hook such as on_train_batch_end, which is called once a batch."
        )


def _attributes(module: Any) -> dict[str, Any]:
    """Return what the attributes of `module` and of all modules in it hold, weights and metrics aside."""
    anchors = module_anchors(module)
    tensors = {name: value for name, value in anchors.items() if isinstance(value, Tensor)}
    walk = GraphWalk({id(value): name for name, value in anchors.items()}, tensors)
    roots = [root for root in module_roots(module) if root.group == "module"]
    return {root.path: copy.deepcopy(walk.root_attributes(root.values, root.path, is_small=False)) for root in roots}
