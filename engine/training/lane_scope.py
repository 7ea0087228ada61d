"""Scope of a lane's step: seeds it, collects its logged values, finds side effects."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, reduce
from operator import is_
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from midstride.engine.data.rng.fast_state import seed_generators
from midstride.engine.errors import NotExact
from midstride.engine.metrics.lane_logger import LaneLogger
from midstride.engine.metrics.torchmetrics_state import is_metric
from midstride.engine.objects.object_state import side_effects_reverted
from midstride.engine.objects.roots import module_anchors, module_roots
from midstride.engine.objects.walk import GraphWalk
from midstride.engine.seeds import Generators, mix
from midstride.engine.state.differences import differences
from midstride.engine.state.module_index import ModuleIndex
from midstride.engine.strategies.step import STEPS
from midstride.engine.strategies.torch_internals import version_of
from midstride.engine.training.context import EvaluationContext

__all__ = ["LaneScope"]

_STAGES = {"train": 0, "validate": 1, "test": 2, "predict": 3}


class LaneScope:
    """Runs steps lane by lane, with random numbers of the lane and the run's position.

    Results must not depend on the number of lanes in a process, so the values that a step leaves in attributes of the
    module may depend neither on the lane nor on the number of lanes before. To check that, the step is run again with
    another lane's batch, and has to leave the same values; its side effects are reverted. The check runs at lanes 2,
    4, 8 and so on, and whenever an attribute is set that was not checked before.

    Args:
        context: context of a call with lanes.
        stage: "train", "validate", "test" or "predict".
        restore_buffers: restores the buffers to their values at the start of a lane; None if steps may not change them.
    """

    def __init__(
        self, context: EvaluationContext, stage: str, restore_buffers: Callable[[], object] | None = None
    ) -> None:
        assert context.lanes is not None
        assert isinstance(context.metric_logger, LaneLogger)
        self._context, self._lanes, self._logged = context, context.lanes, context.metric_logger
        self._seed = mix(context.settings.seed, _STAGES[stage])
        self._name = STEPS[stage]
        self._restore_buffers = restore_buffers
        self._lanes_run = 0
        self._other: tuple[int, Any] | None = None  # loader and batch of the lane before
        self._checked: set[str] = set()

    @contextmanager
    def lane(
        self, lane: int, step: Callable[[Any], object], batch: Any, *position: int, loader: int = 0
    ) -> Iterator[None]:
        """Run `lane` of the batch at `position` in the block.

        Args:
            lane: number of the lane.
            step: function of a batch that is called in the block.
            batch: batch of the lane.
            position: numbers that identify the batch in its stage, such as epoch and index.
            loader: number of the loader.

        Raises:
            NotExact: the step has changed state that depends on the lanes of this rank.
        """
        self._reseed(*position, lane)
        self._lanes_run += 1
        before = _bindings(self._context.module)
        with self._logged.lane(lane), nullcontext() if self._restore_buffers else self._unchanged_buffers():
            yield
        names = _rebound(before) - self._checked
        if self._other is not None and self._other[0] == loader and (names or self._lanes_run.bit_count() == 1):
            self._check_attributes(partial(step, self._other[1]), *position, lane)
            self._checked |= names
        self._other = loader, batch

    def end_batch(self, *position: int) -> None:
        """Seed draws of hooks and callbacks after the batch at `position`, equal on all ranks."""
        self._reseed(*position, self._lanes.count)

    def _reseed(self, *position: int) -> None:
        seed = reduce(mix, position, self._seed)
        seed_generators(seed)
        device = self._context.device
        if device.type == "cuda":
            torch.cuda.default_generators[device.index or 0].manual_seed(seed)

    def _check_attributes(self, step: Callable[[], object], *position: int) -> None:
        """Run `step`, compare its attributes with the present ones, and revert side effects."""
        context = self._context
        expected = _attributes(context.module)
        generators = Generators(context.generator, devices=[context.device])
        with side_effects_reverted(context.module, generators), self._logged.muted():
            if self._restore_buffers is not None:
                self._restore_buffers()
            self._reseed(*position)
            step()
            paths = differences(expected, _attributes(context.module))
        if paths:
            self._refuse(paths, "keep it in a buffer or a metric" if self._restore_buffers else "keep it in a metric")

    @contextmanager
    def _unchanged_buffers(self) -> Iterator[None]:
        before = _versions(self._context.module)
        yield
        now = _versions(self._context.module)
        if changed := [f"the buffer {name}" for name in before if now.get(name) != before[name]]:
            self._refuse(changed, "keep it in a metric")

    def _refuse(self, paths: list[str], way_out: str) -> NoReturn:
        shown = ", ".join(path.strip("/").replace("//", "/") for path in paths[:3])
        raise NotExact(
            f"{type(self._context.module).__name__}.{self._name} changes {shown}: with lanes a rank runs it once per "
            f"lane, and their number must not affect the result. Log the value, {way_out}, or change it in "
            "a hook such as on_train_batch_end, which is called once a batch."
        )


#: of each module: its path, its attributes, and a copy of them
_Bindings = list[tuple[str, dict[str, Any], dict[str, Any]]]


def _bindings(module: nn.Module) -> _Bindings:
    """Return the attributes of `module` and submodules, without metrics, with a shallow copy."""
    return [(path, vars(part), dict(vars(part))) for path, part in module.named_modules() if not is_metric(part)]


def _rebound(bindings: _Bindings) -> set[str]:
    """Return the names of attributes that were rebound since `bindings` were taken."""
    names: set[str] = set()
    for path, now, then in bindings:
        if len(now) != len(then) or not all(map(is_, now.values(), then.values())):
            names |= {f"{path}.{name}" for name in now.keys() | then.keys() if now.get(name) is not then.get(name)}
    return names


def _versions(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Return the identity and the version counter of each buffer."""
    return {name: (id(buffer), version_of(buffer)) for name, buffer in module.named_buffers()}


def _attributes(module: Any) -> dict[str, Any]:
    """Return copies of the attributes of `module` and submodules, without weights and metrics."""
    members = ModuleIndex.of(module).now()
    anchors = module_anchors(members)
    tensors = {name: value for name, value in anchors.items() if isinstance(value, Tensor)}
    walk = GraphWalk({id(value): name for name, value in anchors.items()}, tensors)
    roots = [root for root in module_roots(members) if root.group == "module"]
    return {root.path: copy.deepcopy(walk.root_attributes(root.values, root.path, is_small=False)) for root in roots}
