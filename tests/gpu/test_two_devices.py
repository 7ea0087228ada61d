"""Every strategy on two GPUs without data: what it places, moves, logs, clips stays on its device.

An operation on tensors of two devices raises here as it does on GPUs, and so does the host when it reads a number.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from midstride.engine import Trainer, TrainingModule
from midstride.engine.checkpointing.identity import environment_changes, environment_of
from midstride.engine.metrics.accumulator import Accumulator
from midstride.engine.metrics.logger import MetricLogger
from midstride.engine.metrics.torchmetrics_state import TorchmetricsState
from midstride.engine.optim.precision import Precision
from midstride.engine.session.heartbeat import Heartbeat
from midstride.engine.strategies import ddp, dp
from midstride.engine.strategies.build_strategy import build_strategy
from midstride.engine.strategies.collective import SingleProcess
from midstride.engine.strategies.pipeline import strategy as pipeline
from midstride.engine.strategies.step import StepScope, TrainingStep
from midstride.engine.strategies.torch_collective import average_gradients
from midstride.engine.training.batch_transfer import BatchStream, batch_transfer, copy_stream
from midstride.engine.trees import move, to_host
from midstride.engine.world import World

GPUS = [torch.device("cuda", 0), torch.device("cuda", 1)]


class Net(TrainingModule):
    """Logs in each way there is."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch["x"]
        assert x.device == self.device
        self.seen += 1
        loss = self.net(x).square().mean()
        self.log("plain", loss)
        self.log("both", loss, on_step=True, on_epoch=True)
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.log("smallest", loss, on_step=False, on_epoch=True, reduce_fx="min")
        self.log("synced", loss, sync_dist=True)
        return loss


def on_gpu(module: nn.Module, device: torch.device) -> nn.Module:
    """Bring `module` there, without a gradient: torch without CUDA knows no backward pass for it."""
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            part._parameters[name] = nn.Parameter(parameter.detach().to(device), requires_grad=False)
        for name, buffer in part.named_buffers(recurse=False):
            part._buffers[name] = buffer.to(device)
    return module


def scope(module: TrainingModule, monkeypatch: pytest.MonkeyPatch) -> StepScope:
    """What surrounds a step, with a logger of its own that `self.log` finds."""
    logger = MetricLogger(lambda value: [value], TorchmetricsState(module, lambda value: [value], 1), 1)
    monkeypatch.setattr(TrainingModule, "log", lambda self, name, value, **asked: log(logger, name, value, **asked))
    return StepScope(logger, Precision("32", GPUS[0]), Heartbeat())


def log(logger: MetricLogger, name: str, value: Tensor, **asked: Any) -> None:
    on_step, on_epoch, sync = asked.get("on_step"), asked.get("on_epoch"), asked.get("sync_dist", False)
    logger.log((name, on_step, on_epoch, False, sync, asked.get("reduce_fx", "mean"), True), value, None)


def values_of(logger: MetricLogger) -> list[Any]:
    """Every value that waits to be read."""
    return [*logger.values.values(), *(running.total for running in logger.pending.running.values())]


#: strategy -> devices of the process
STRATEGIES = {"single": GPUS[:1], "ddp": GPUS[:1], "dp": GPUS, "ddp2": GPUS, "sharded": GPUS[1:]}


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_step_and_its_logged_values_stay_on_the_device(
    name: str, fake: FakeTensorMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    strategy = build_strategy(name)
    strategy.attach(World(), STRATEGIES[name])
    module = Net()
    on_gpu(module, strategy.device)
    module.device = strategy.device
    around = scope(module, monkeypatch)
    batch = move({"x": torch.zeros(6, 4)}, strategy.device)
    around.metric_logger.begin_batch(batch)
    for _ in range(2):
        outputs = strategy.step_call(around, module, "training_step")(batch, 0)
    assert outputs.device == strategy.device
    assert module.seen.device == strategy.device
    values = values_of(around.metric_logger)
    assert len(values) == 7  # that of "both" is known by two names until the epoch ends, and adds to its mean
    assert {value.device for value in values} == {strategy.device}


class Copies(TorchDispatchMode):
    """Counts what comes to each device from the other."""

    def __init__(self) -> None:
        super().__init__()
        self.to: Counter[torch.device] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        source = args[0].device if args and isinstance(args[0], Tensor) else None
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and source is not None and out.device != source and "meta" not in str(out.device):
            self.to[out.device] += 1
        return out


def test_dp_copies_all_tensors_of_a_net_together(fake: FakeTensorMode) -> None:
    layers = [nn.Linear(4, 4), nn.BatchNorm1d(4), *(nn.Linear(4, 4) for _ in range(9)), nn.Linear(4, 2)]
    net = on_gpu(nn.Sequential(*layers), GPUS[0])
    with Copies() as copies:
        tensors = dp._tensors(net, GPUS)
    # parameters, and the buffers of each of their two types
    assert copies.to == {GPUS[1]: 3}
    assert [{tensor.device for tensor in there.values()} for there in tensors] == [{gpu} for gpu in GPUS]
    first, second = ([there[id(p)] for p in net.parameters()] for there in tensors)
    context: Any = SimpleNamespace(devices=GPUS, home=GPUS[0], needs_input_grad=(False, *(True for _ in first)))
    with Copies() as copies:
        nothing, *sums = dp._Broadcast.backward(context, *first, *second)
    assert copies.to == {GPUS[0]: 1}
    assert nothing is None
    assert [total is not None and total.device for total in sums] == [GPUS[0]] * len(first)


@pytest.fixture
def no_stream() -> Iterator[None]:
    """No stream for copies is there yet, nor afterwards."""
    copy_stream.cache_clear()
    yield
    copy_stream.cache_clear()


@pytest.mark.usefixtures("no_stream")
def test_batches_of_all_loaders_come_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stream keeps the memory of its batches to itself."""
    made: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "Stream", made.append)
    for device in GPUS:
        context = replace(Trainer(max_epochs=1).context, device=device)
        for loader in (0, 1, 0, 1):  # as in two validations
            batch_transfer(context, loader)
    assert made == GPUS


@pytest.mark.usefixtures("no_stream")
def test_a_batch_is_copied_on_a_stream_that_the_step_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    device, calls = torch.device("meta"), list[str]()

    class Stream(nullcontext[None]):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def __enter__(self) -> None:
            calls.append(f"begin on {self.name}")

        def __exit__(self, *raised: object) -> None:
            calls.append(f"end on {self.name}")

        def wait_stream(self, other: "Stream") -> None:
            calls.append(f"{self.name} waits for {other.name}")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("copies"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("steps"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: calls.append(f"memory kept for {stream.name}"))
    batch = {"x": torch.zeros(6, 4), "y": [torch.eye(3).to_sparse()], "there": torch.zeros(2, device=device)}
    moved = BatchStream(device).move(batch)
    assert {moved["x"].device, moved["y"][0].device} == {device}
    assert moved["there"] is batch["there"]
    assert calls == ["begin on copies", "end on copies", "memory kept for steps", "steps waits for copies"]


def test_ddp_takes_the_batch_as_it_is(fake: FakeTensorMode, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []

    def wrapped(module: nn.Module, **options: Any) -> nn.Module:
        made.append(options)
        return module

    monkeypatch.setattr(ddp, "DistributedDataParallel", wrapped)
    strategy = build_strategy("ddp", {"bucket_cap_mb": 50, "gradient_as_bucket_view": True})
    strategy.attach(World(size=2), GPUS[1:])
    module = Net()
    around = scope(module, monkeypatch)
    step = TrainingStep(module, around, strategy.step_call(around, module, "training_step"))
    strategy.wrap(step, one_backward=True)
    (options,) = made
    assert options["device_ids"] is None  # else it moves the batch again, and rebuilds its dicts
    assert (options["bucket_cap_mb"], options["gradient_as_bucket_view"]) == (50, True)


def test_a_batch_of_any_kind_comes_to_its_device(fake: FakeTensorMode) -> None:
    batch = defaultdict(list, x=torch.zeros(2), more=[torch.zeros(1), "text"])
    moved = move(batch, GPUS[1])
    assert type(moved) is defaultdict
    assert moved.default_factory is list
    assert (moved["x"].device, moved["more"][0].device, moved["more"][1]) == (GPUS[1], GPUS[1], "text")
    assert to_host(moved)["more"][0].device == torch.device("cpu")


@pytest.mark.parametrize("reduce_fx", ["mean", "sum", "min", "max"])
def test_values_of_two_devices_are_joined_on_the_first(reduce_fx: str, fake: FakeTensorMode) -> None:
    running = Accumulator(reduce_fx, sync=False)
    for device in GPUS:
        running.add(torch.zeros((), device="cpu").to(device), 3.0)
    assert running.pending_value.device == GPUS[0]


@pytest.mark.parametrize("reduce_fx", ["mean", "sum", "min", "max"])
def test_a_total_from_a_snapshot_goes_on_where_values_are(reduce_fx: str, fake: FakeTensorMode) -> None:
    running = Accumulator(reduce_fx, sync=False, total=torch.zeros((), device="cpu"), weight=3.0)
    running.add(torch.zeros((), device="cpu").to(GPUS[1]), 3.0)
    assert running.pending_value.device == GPUS[1]


class Layers(TrainingModule):
    def __init__(self) -> None:
        super().__init__()
        self.sequential_module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), nn.Linear(4, 2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.sequential_module(batch)


def test_pipeline_measures_layers_that_are_on_the_host(fake: FakeTensorMode, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy: Any = build_strategy("pipeline", {"stages": 2})
    strategy.attach(World(), GPUS[:1])
    strategy.collective = SingleProcess()
    monkeypatch.setattr(nn.Module, "to", on_gpu)
    monkeypatch.setattr(pipeline, "side_effects_reverted", lambda module, device: nullcontext())
    monkeypatch.setattr(
        pipeline, "first_micro_batch", lambda x, count: x
    )  # to slice there is beyond tensors without data
    module = Layers()
    cut = strategy._cut(
        module, scope(module, monkeypatch), module.sequential_module, lambda: torch.zeros(6, 4).to(GPUS[0])
    )
    assert sum(cut) == 4
    assert len(cut) == 2


def test_layers_of_other_stages_come_to_the_host(fake: FakeTensorMode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Together they may be too large for the device."""
    received: list[torch.device] = []
    monkeypatch.setattr(torch.distributed, "recv", lambda tensor, rank: received.append(tensor.device))
    strategy: Any = build_strategy("pipeline", {"stages": 2})
    strategy.attach(World(size=2), GPUS[:1])
    strategy._location = pipeline.PipelineLocation((1, 0), 1, None, None, GPUS[0])  # type: ignore[arg-type]
    theirs = {"sequential_module.9.weight": (torch.Size([2, 2]), torch.float32)}
    strategy.collective = SimpleNamespace(gather=lambda mine: [mine, theirs])
    module = Layers()
    on_gpu(module, GPUS[0])
    weights = strategy.full_state_dict(module)
    assert received == [GPUS[0]]  # over NCCL
    assert weights.pop("sequential_module.9.weight").device.type == "cpu"
    assert {tensor.device for tensor in weights.values()} == {GPUS[0]}


def test_which_gradients_there_are_is_told_on_the_host(fake: FakeTensorMode, monkeypatch: pytest.MonkeyPatch) -> None:
    exchanged: list[torch.device] = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, **options: exchanged.append(tensor.device))
    average_gradients([nn.Parameter(torch.zeros(3))], GPUS[0], 2)
    assert exchanged == [torch.device("cpu")]


def test_a_number_of_a_device_cannot_be_read_here(fake: FakeTensorMode) -> None:
    with pytest.raises(Exception, match="_local_scalar_dense"):
        torch.zeros(()).to(GPUS[0]).item()


class Moving(TrainingModule):
    """Brings its batches to a device by itself."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [*batch, "before"]

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return [*batch, f"to {device} of loader {dataloader_idx}"]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [*batch, "after"]


@pytest.mark.usefixtures("no_stream")
def test_a_module_moves_its_batches_on_the_stream_of_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)  # whatever uses it fails
    context = replace(Trainer(max_epochs=1).context, module=Moving(), device=GPUS[1])
    assert batch_transfer(context, 3)([]) == ["before", "to cuda:1 of loader 3", "after"]


def test_another_gpu_or_cuda_than_before_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"kind {device.index}")
    before, now = (environment_of([], device) for device in GPUS)
    assert environment_changes(before, before) == []
    (line,) = environment_changes(before, now)
    assert "gpu was 'kind 0' and is 'kind 1'" in line
    lines = environment_changes({**before, "cuda": "11.0"}, now)
    assert [line.partition(" ")[0] for line in lines] == ["gpu", "cuda"]
