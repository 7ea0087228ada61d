"""Pipeline parallelism: a module's layers in stages, one process each."""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from midstride.engine.config.options import TrainerOptions
from midstride.engine.errors import UserError
from midstride.engine.modules.module import TrainingModule, has_step
from midstride.engine.objects.object_state import side_effects_reverted
from midstride.engine.seeds import Generators
from midstride.engine.strategies.base import Strategy
from midstride.engine.strategies.mixins import LossOf, Measures, ModelParallel, RunsBackward
from midstride.engine.strategies.pipeline.balance import balance_stages, faults_of, sizes_of, times_of
from midstride.engine.strategies.pipeline.schedule import (
    PipelineLinks,
    PipelineLocation,
    PipelineSchedule,
    first_micro_batch,
    micro_batch_count,
)
from midstride.engine.strategies.pipeline.stage import DeferredOutput, Stage, StagedSequential
from midstride.engine.strategies.step import StepScope, TrainingStep
from midstride.engine.strategies.torch_collective import average_gradients, broadcast
from midstride.engine.strategies.torch_internals import foreach_norm
from midstride.engine.trees import convert
from midstride.engine.world import World

__all__ = ["Pipeline"]

log = logging.getLogger(__name__)


class Pipeline(ModelParallel, RunsBackward, Measures, Strategy):
    """Cuts `self.sequential_module` into stages, one process each.

    The schedule is that of `torch.distributed.pipelining`.

    With more processes than stages there are several pipelines: replicas, which read samples of their own and average
    their gradients. A pipeline consists of consecutive ranks, the first of which has the last stage, so that rank 0
    has outputs, loss and logged values, as with every other strategy.

    Args:
        balance: layers of each stage, such as [2, 3]; "size" (default) balances the bytes of the stages, "time" their
            seconds. Snapshots hold the measured values, and later attempts cut the same way. Two runs can measure
            different seconds and end with different bits.
        stages: processes a pipeline; all of them by default.
        micro_batches: equal parts in which a batch flows, at most; as many as stages by default.
        schedule: "1f1b" holds the activations of as many parts as there are stages, "gpipe" those of all.
        checkpoint: hold no activations within a stage; they are computed again for the backward pass.
    """

    name = "pipeline"
    fixed_world: ClassVar[str | None] = "every process keeps the layers of its own stage"

    def __init__(
        self,
        *,
        balance: Sequence[int] | Literal["size", "time"] | None = None,
        stages: int | None = None,
        micro_batches: int | None = None,
        schedule: Literal["1f1b", "gpipe"] = "1f1b",
        checkpoint: bool = False,
    ) -> None:
        self._links = PipelineLinks()
        super().__init__(self._links)
        self._by = balance if isinstance(balance, str) else "size" if balance is None else "hand"
        self._balance = list(balance) if balance is not None and not isinstance(balance, str) else []
        self._wanted, self._micro_batches = stages or len(self._balance) or None, micro_batches
        self._schedule, self._checkpoint = schedule, checkpoint
        self._pipeline_groups: list[Any] = []
        self._replicas: Any = None
        self._location: PipelineLocation
        self._pipeline: PipelineSchedule

    @property
    def stages(self) -> int:
        """Number of stages."""
        return self._wanted or self.world.size

    @property
    def micro_batches(self) -> int:
        """Largest number of micro-batches in a batch."""
        return self._micro_batches or self.stages

    @property
    def identity(self) -> str:
        """Name, balance and number of micro-batches, which change the bits of a run."""
        return f"{self.name}(stages={self.stages}, balance={self._balance}, micro_batches={self.micro_batches})"

    @property
    def data_world(self) -> World:
        """A world with one rank per pipeline, all of whose processes read the same samples."""
        pipelines = self.world.size // self.stages
        return World(rank=self.world.rank // self.stages, size=pipelines, local_size=pipelines)

    def measurements(self) -> dict[str, Any]:
        """Return the number of stages, and the number of layers of each."""
        return {"stages": self.stages, "balance": self._balance}

    def load_measurements(self, measurements: dict[str, Any]) -> None:
        """Use the balance of an earlier attempt with as many stages, unless a balance was given."""
        if self._by != "hand" and measurements.get("stages") == self.stages:
            self._balance = list(measurements["balance"])

    def module_errors(self, module: TrainingModule) -> list[str]:
        """Return messages on parts of `module` that a pipeline does not support."""
        name, size, stages = type(module).__name__, self.world.size, self.stages
        faults = super().module_errors(module)
        if stages < 2 or size % stages:
            faults.append(
                f"strategy pipeline with {stages} stages in a world of {size} processes: use at least 2 stages, and a "
                "multiple of that number of processes"
            )
        if not module.automatic_optimization:
            faults.append(
                f"{name} has automatic_optimization = False: use automatic optimization in a pipeline, where forward "
                "and backward passes of a batch's parts alternate"
            )
        if not has_step(module, "training_step_end"):
            faults.append(
                f"{name} has no training_step_end(outputs, batch): compute the loss there. In a pipeline it runs on "
                "the last stage, and training_step returns the result of self.sequential_module"
            )
        return faults + self._module_faults(module)

    def _module_faults(self, module: TrainingModule) -> list[str]:
        name, layers = type(module).__name__, getattr(module, "sequential_module", None)
        if not isinstance(layers, nn.Sequential):
            found = "none" if layers is None else f"a {type(layers).__name__}"
            return [f"strategy pipeline cuts self.sequential_module, an nn.Sequential; {name} has {found}"]
        faults = []
        inside = {id(parameter) for parameter in layers.parameters()}
        if outside := [path for path, p in module.named_parameters() if id(p) not in inside]:
            faults.append(
                f"{name} has parameters outside sequential_module, and no stage to put them in: {', '.join(outside)}"
            )
        if len(layers) < self.stages:
            faults.append(f"{self.stages} stages, and sequential_module of {name} has {len(layers)} layers only")
        elif not isinstance(layers, StagedSequential) and self._by == "hand":
            faults += faults_of(list(layers), self._balance)
        return faults

    def fit_errors(self, optimizers: Sequence[Optimizer], options: TrainerOptions, batch_size: int | None) -> list[str]:
        """Return messages on settings of a fit that a pipeline does not support."""
        faults = []
        if len(optimizers) > 1:
            faults.append(
                f"strategy pipeline with {len(optimizers)} optimizers: use one, because each part of a batch runs once"
            )
        if batch_size is not None and self.micro_batches > batch_size:
            faults.append(
                f"micro_batches={self.micro_batches}, and a batch has {batch_size} samples: use fewer micro_batches, "
                "or a larger batch_size"
            )
        if options.on_nan == "skip":
            faults.append(
                "on_nan: skip with strategy pipeline: use on_nan: fail. The first parts of a batch have run backward "
                "before the loss of the last one is known"
            )
        return faults

    def init_process_group(self) -> None:
        """Connect to the other ranks. Make groups of this pipeline, and of ranks with this stage."""
        super().init_process_group()
        if self._pipeline_groups:
            return
        size, stages = self.world.size, self.stages
        starts = range(0, size, stages)
        pipelines = [list(range(start, start + stages)) for start in starts]
        self._pipeline_groups = [dist.new_group(ranks) for ranks in pipelines]
        same_stage = [dist.new_group([start + stage for start in starts]) for stage in range(stages)]
        pipeline, stage = divmod(self.world.rank, stages)
        self._replicas = same_stage[stage]
        ranks, group = tuple(pipelines[pipeline][::-1]), self._pipeline_groups[pipeline]
        self._location = PipelineLocation(ranks, stages - 1 - stage, group, self._links, self.device)
        self._links.connect(pipelines)

    def setup_module(
        self, module: TrainingModule, scope: StepScope, first_batch: Callable[[], Any] | None = None
    ) -> None:
        """Replace `sequential_module` by this rank's stage of it."""
        layers: Any = module.sequential_module
        if not isinstance(layers, StagedSequential):
            balance = self._cut(module, scope, layers, first_batch)
            layers = module.sequential_module = StagedSequential(layers, balance, self._location.stage)
        elif layers.balance != (self._balance or layers.balance):
            raise UserError(
                f"sequential_module was cut by balance={layers.balance} earlier in this process, and now has "
                f"balance={self._balance}: build the module again."
            )
        self._balance = layers.balance
        module.to(self.device)
        if not self._location.is_last:
            scope.mute()
        stage = Stage(
            layers.own,
            layers.first,
            scope.forward,
            is_last=self._location.is_last,
            checkpoints=self._checkpoint,
        )
        self._pipeline = PipelineSchedule(stage, self._location, self.micro_batches, self._schedule)
        layers.set_pipeline(self._pipeline.evaluate)

    def _cut(
        self,
        module: TrainingModule,
        scope: StepScope,
        layers: nn.Sequential,
        first_batch: Callable[[], Any] | None,
    ) -> list[int]:
        """Return the number of layers of each stage; rank 0 measures and broadcasts it."""
        if sum(self._balance) == len(layers):
            return self._balance
        batch = first_batch() if first_batch is not None else None  # on every rank, because a loader can be collective
        found: list[int] | UserError = []
        if self.world.is_first:
            try:
                costs = sizes_of(list(layers)) if first_batch is None else self._costs(module, scope, layers, batch)
                found = balance_stages(costs, list(layers), self.stages)
            except UserError as error:
                found = error
        balance: list[int] | UserError = self.collective.broadcast(found)
        if isinstance(balance, UserError):
            raise balance
        if self._by == "time" and first_batch is not None and self.world.is_first:
            log.warning(
                "balance: time has measured the layers and cuts them into %s. Later attempts of this run cut them in "
                "the same way. Another run can measure other seconds, cut elsewhere, and end with other bits. "
                "To repeat this cut: balance: %s",
                balance,
                balance,
            )
        return balance

    def _costs(self, module: TrainingModule, scope: StepScope, layers: nn.Sequential, batch: Any) -> list[float]:
        # Without its layers, which can be too large for the device.
        no_layers = module.sequential_module = StagedSequential(layers, [0], 0)
        module.to(self.device)
        generators = Generators(devices=[self.device])
        try:
            with scope.muted(), side_effects_reverted(module, generators), no_layers.deferred():
                outputs = scope.call(module, "training_step", batch, 0)
        finally:
            module.sequential_module = layers
        x = _deferred_input(module, outputs)
        count = micro_batch_count(x, batch, self.micro_batches)
        micro_batch = first_micro_batch(x, count)
        with side_effects_reverted(layers, generators), scope.forward():
            if self._by == "time":
                return times_of(list(layers), micro_batch, self.device)
            return sizes_of(list(layers), convert(micro_batch, lambda tensor: tensor.to("cpu")), count)

    def wrap(self, step: TrainingStep, *, one_backward: bool) -> nn.Module:
        """Return `step` itself. Gradients are averaged over pipelines after the last micro-batch."""
        if self.data_world.size > 1:
            broadcast(step, self.world.rank % self.stages, self._replicas)
        return step

    def train(self, wrapped: nn.Module, batch: Any, index: int, loss_of: LossOf) -> None:
        """Run `training_step`'s input of `sequential_module` through all stages, in micro-batches."""
        module: Any = wrapped.module
        layers: StagedSequential = module.sequential_module
        with layers.deferred():
            x = _deferred_input(module, wrapped(batch, index))
        self._pipeline.train(x, batch, loss_of)

    def reduce_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Average the gradients of this stage over the pipelines."""
        if self.data_world.size > 1:
            average_gradients(parameters, self.device, self.data_world.size, self._replicas)

    def clip_gradients(self, parameters: Sequence[Tensor], max_norm: float) -> None:
        """Clip by the norm over all stages, from the norms of all gradients in the order of layers."""
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norms = torch.tensor([]) if not grads else torch.stack(foreach_norm(grads)).cpu()
        every: list[Any] = [None] * self.stages
        dist.all_gather_object(every, norms, group=self._location.group)
        total = torch.linalg.vector_norm(torch.cat(every[::-1])).to(self.device)
        nn.utils.clip_grads_with_norm_(parameters, max_norm, total)

    def full_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return all stages' layers on rank 0, others' on the host; elsewhere the own layers."""
        own, prefix = module.state_dict(), "sequential_module."
        stage = {name: t for name, t in own.items() if name.startswith(prefix) and isinstance(t, Tensor)}
        everyone = self.collective.gather({name: (t.shape, t.dtype) for name, t in stage.items()})
        if self.world.is_first:
            for rank in self._location.ranks[:-1]:
                for name, (shape, dtype) in everyone[rank].items():
                    received = torch.empty(shape, dtype=dtype, device=self.device)
                    dist.recv(received, rank)
                    own[name] = received.cpu()  # all layers can be too large for the device
        elif 0 in self._location.ranks:
            for tensor in stage.values():
                dist.send(tensor.contiguous(), 0)
        return own

    def is_replicated(self, path: str) -> bool:
        """Return False: each rank has its own layers."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return the measurements."""
        return self.measurements()

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Do nothing: `load_measurements` has applied it before `setup_module`."""


def _deferred_input(module: TrainingModule, outputs: Any) -> Any:
    """Return the input of `sequential_module`, given the outputs of a training step.

    Raises:
        UserError: the step did not return the outputs of `sequential_module` as they are.
    """
    if isinstance(outputs, DeferredOutput):
        return outputs.x
    raise UserError(
        f"{type(module).__name__}.training_step returned a {type(outputs).__name__}; in a pipeline, return the result "
        "of self.sequential_module unchanged. Compute the loss in training_step_end(outputs, batch)."
    )
