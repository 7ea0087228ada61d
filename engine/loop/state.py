"""The state of a loop: parts that are restored, and facts that each snapshot repeats."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import torch
from torch import distributed, nn

from midstride.engine.checkpointing.context import RunContext
from midstride.engine.checkpointing.gradients import Gradients
from midstride.engine.checkpointing.identity import identity_of
from midstride.engine.checkpointing.roots import (
    SamplerValues,
    data_in,
    data_roots,
    global_generators,
    loader_roots,
    optimizer_roots,
    sources,
    unsaved_values,
)
from midstride.engine.checkpointing.run_state import RunFacts, RunState
from midstride.engine.checkpointing.sample_log import SampleLog
from midstride.engine.checkpointing.settings import Settings
from midstride.engine.loop.feeds import LoopFeeds
from midstride.engine.loop.kept import Kept, KeptModules
from midstride.engine.modules.module_state import NonPersistentBuffers, TrainingModes
from midstride.engine.modules.structure import ModuleStructure
from midstride.engine.modules.torch_internals import gradient_hooks_of
from midstride.engine.objects.object_state import Objects
from midstride.engine.objects.roots import QuietOwners, Root, is_user_hook, module_anchors, module_roots
from midstride.engine.optim.optimizers import OptimizerList
from midstride.engine.optim.schedulers import SchedulerList, saved_schedulers
from midstride.engine.seeds import Generators
from midstride.engine.state.module_index import Members
from midstride.engine.state.object_nodes import kind_name
from midstride.engine.state.stateful import Stateful
from midstride.engine.strategies.mixins import ModelParallel, saved_weights

__all__ = ["KeptObjects", "LoopObjects", "LoopPosition", "LoopState", "addresses_in", "loop_state", "outer_values"]

_WAY_TO_KEEP = "keep it: as loop.state.name = value for a number or a text, as loop.keep(name=object) for an object"


class LoopState:
    """`loop.state`: a namespace whose attributes are part of snapshots."""

    def __repr__(self) -> str:
        return f"LoopState({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


class KeptObjects:
    """Holds the kept objects that are no modules, optimizers and schedulers, as attributes."""

    def __init__(self, others: Mapping[str, Any]) -> None:
        vars(self).update(others)


def addresses_in(others: Mapping[str, Any]) -> Container[int]:
    """Return the addresses of the objects in `others` that a restore fills, such as tensors."""

    def roots(members: Members, quiet: QuietOwners | None) -> Iterator[Root]:
        yield Root("kept", "", dict(others))

    return Objects(nn.Module(), roots, module_anchors, torch.device("cpu"), is_kept=False).places()


@dataclass
class LoopPosition:
    """Position of a loop beside its `Progress`: the call of `epochs` or `steps`, and how far.

    Args:
        call: number of the call, from 0.
        ended: how this call ended, if it did: at its "end", or by a "break".
        epoch: epochs of this call that are completed.
        step: steps of this call that are completed.
        lead: name of the loader at whose batches the boundaries of this epoch are; "" if none was read.
    """

    call: int = 0
    ended: Literal["", "end", "break"] = ""
    epoch: int = 0
    step: int = 0
    lead: str = ""

    def begin_call(self, number: int) -> None:
        """Set the position to the start of a call."""
        self.call, self.ended, self.epoch, self.step, self.lead = number, "", 0, 0, ""

    def continue_call(self) -> None:
        """Record that an ended call continues, since it was given a larger number."""
        self.ended = ""

    def end_call(self, how: Literal["end", "break"]) -> None:
        """Record how the call ended."""
        self.ended = how

    def step_done(self) -> None:
        """Count a step."""
        self.step += 1

    def follow(self, loader: str) -> None:
        """Set the loader that leads the epoch."""
        self.lead = loader

    def epoch_done(self) -> None:
        """Count an epoch."""
        self.epoch, self.lead = self.epoch + 1, ""

    def state_dict(self) -> dict[str, Any]:
        """Return all values by name."""
        return asdict(self)

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore all values."""
        for field in fields(self):
            setattr(self, field.name, state_dict[field.name])


@dataclass(frozen=True)
class LoopObjects:
    """The objects of a loop.

    Args:
        kept: the kept objects.
        modules: the kept modules as one.
        feeds: the loaders.
        state: `loop.state`.
        script: an object of a class that stands for the user's script.
        others: holds the kept objects that are no modules, optimizers and schedulers.
    """

    kept: Kept
    modules: KeptModules
    feeds: LoopFeeds
    state: LoopState
    script: object
    others: KeptObjects

    def sources(self) -> dict[str, Any]:
        """Return the user's loaders and samplers by name."""
        return sources({f"loader {feed.name}": feed.reader for feed in self.feeds.feeds})

    @property
    def holders(self) -> Sequence[object]:
        """The objects of the training."""
        data = data_in(self.sources()).values()
        own = [*self.modules.modules()][1:]  # without the one that holds them
        kept = [one for name, one in self.kept.named.items() if name not in self.kept.modules]
        return [self.script, *own, *kept, *(owner for owner, _ in self.kept.owners.values()), *data]


def loop_state(
    context: RunContext,
    objects: LoopObjects,
    own: Mapping[str, Stateful],
    watched: Callable[[Objects], Callable[[], Iterator[tuple[str, object]]]],
    code: Callable[[], Iterable[object]],
) -> RunState:
    """Return the state of a loop, before anything is restored.

    Args:
        context: context of the run.
        objects: objects of the loop.
        own: parts that a loop has and a fit has not, by name.
        watched: returns a function that yields names and values that no part holds, given the part that holds objects.
        code: returns the functions and classes that the loop calls.
    """
    samples = SampleLog(context.world.rank, context.world.size)
    optimizers, schedulers = list(objects.kept.optimizers.values()), list(objects.kept.schedulers.values())
    graph = _objects_of(objects, context)
    return RunState(
        parts=_parts(context, objects, own, samples, graph),
        loaders=objects.feeds,
        samples=samples,
        settings=Settings(
            optimizers,
            schedulers,
            maker="the script keeps",
            place="in the script, after a step",
            is_accepted="settings" in context.settings.accept_change,
            attributes=lambda: graph.without_effect,
        ),
        facts=LoopFacts(context, objects),
        weights=lambda: saved_weights(context.strategy, objects.modules),
        watched=watched(graph),
        places=graph.places,
        code=lambda: [*map(type, objects.holders), *graph.code, *code()],
        way_to_keep=_WAY_TO_KEEP,
    )


def _parts(
    context: RunContext, objects: LoopObjects, own: Mapping[str, Stateful], samples: SampleLog, graph: Objects
) -> dict[str, Stateful]:
    """Return all state of a loop, by name, in the order of the restore."""
    strategy, modules, kept = context.strategy, objects.modules, objects.kept
    wrap = strategy.wrap_state if isinstance(strategy, ModelParallel) else _identity
    optimizers = list(kept.optimizers.values())
    devices = dict.fromkeys([context.device, *(parameter.device for parameter in modules.parameters())])
    return {
        "strategy": strategy,
        "progress": context.progress,
        **own,
        "samples": samples,
        "feeds": objects.feeds,
        "structure": ModuleStructure(modules, context.device),
        "module": wrap(modules),
        "optimizers": wrap(OptimizerList(lambda: optimizers, modules)),
        "schedulers": SchedulerList(list(kept.schedulers.values())),
        "logged": context.metric_logger,
        "metrics": context.metric_logger.metrics,
        "gradients": wrap(Gradients(modules)),
        "modes": TrainingModes(modules),
        "buffers": NonPersistentBuffers(modules, context.device),
        "objects": graph,
        "generators": Generators(devices=[*devices]),
    }


def _identity(part: Stateful) -> Stateful:
    return part


def _objects_of(objects: LoopObjects, context: RunContext) -> Objects:
    """Return the objects of a loop as one part of its state."""
    kept, others = objects.kept, objects.others
    samplers = SamplerValues(objects.sources)
    schedulers = list(kept.schedulers.values())

    def roots(members: Members, quiet: QuietOwners | None) -> Iterator[Root]:
        yield from module_roots(members, quiet)
        yield Root("state", "", vars(objects.state), objects.state)
        yield Root("kept", "", vars(others), others)
        for name, (owner, names) in kept.owners.items():
            yield Root("kept", name, {key: value for key, value in vars(owner).items() if key in names}, owner)
        yield from _exchange_roots(kept)
        yield from data_roots(data_in(objects.sources()))
        yield from loader_roots(objects.sources())
        yield from samplers.roots()
        yield from optimizer_roots(kept.optimizers.values(), schedulers)
        yield from global_generators(objects.holders)

    def anchors(members: Members) -> dict[str, object]:
        named = module_anchors(members) | {"state": objects.state}
        named |= {f"optimizer {name}": optimizer for name, optimizer in kept.optimizers.items()}
        for name, config in kept.schedulers.items():
            named |= saved_schedulers(config.scheduler, f"scheduler {name}")
        named |= {f"data {name}": owner for name, owner in data_in(objects.sources()).items()} | samplers.anchors()
        return named | objects.sources()

    takes_settings = "settings" in context.settings.accept_change
    return Objects(objects.modules, roots, anchors, context.device, takes_settings=takes_settings)


def _exchange_roots(kept: Kept) -> Iterator[Root]:
    """Yield the states of the hooks by which replicas exchange gradients, and users' hooks."""
    for name, wrapped in kept.replicated.items():
        hooks = [*enumerate(gradient_hooks_of(wrapped))]
        own = {f"hook {number}": hook for number, (hook, _) in hooks if is_user_hook(hook)}
        yield Root("exchange", name, own | {f"state {number}": state for number, (_, state) in hooks})


def outer_values(objects: LoopObjects, graph: Objects) -> Iterator[tuple[str, object]]:
    """Yield globals, class attributes and large data around a loop, which no snapshot holds."""
    yield from unsaved_values(objects.holders, objects.sources(), graph)
    if distributed.is_available() and distributed.is_initialized():  # a new replica sums in an order of its own
        replicas = sorted((path, id(one)) for path, one in objects.kept.live_replicas())
        yield from ((f"the DistributedDataParallel around {path} ({one:x})", True) for path, one in replicas)


class LoopFacts(RunFacts):
    """The identity of a loop: kept objects, loaders and seed."""

    def __init__(self, context: RunContext, objects: LoopObjects) -> None:
        self._context, self._objects = context, objects

    def identity(self) -> dict[str, Any]:
        """Return classes of kept objects, orders of loaders, seed and strategy, on all ranks."""
        context, objects = self._context, self._objects
        orders = [order for feed in objects.feeds.feeds if (order := feed.reader.order_identity())]
        first, *others = context.collective.broadcast(orders) or [{}]
        kept = context.collective.gather({name: kind_name(type(one)) for name, one in objects.kept.named.items()})
        return {
            "module": {name: kind for of_rank in reversed(kept) for name, kind in of_rank.items()},
            **dict(context.settings.identity),
            "seed": context.settings.seed,
            **first,
            **({"other_loaders": others} if others else {}),
            "processes": context.world.size,
            "strategy": context.strategy.identity,
        }

    def classes(self) -> set[type]:
        """Return the classes of the script, the kept objects, data and samplers."""
        return {type(one) for one in (*self._objects.holders, *self._objects.sources().values())}

    def hyperparameters(self) -> dict[str, Any]:
        """Return "hparams": hyperparameters that were given to a logger."""
        found = self._context.metric_logger.hparams
        return {"hparams": identity_of(found)} if found else {}

    def of_weights(self) -> dict[str, Any]:
        """Return metadata of the weights as they are now."""
        context = self._context
        return {
            "step": context.progress.step,
            "epoch": context.progress.epoch,
            "module": ", ".join(kind_name(type(module)) for module in self._objects.kept.modules.values()),
            "hparams": {},
            "hparams_left_out": [],
            "metrics": {name: float(value) for name, value in context.metric_logger.values.items()},
            "monitors": [],
        }
