"""Where a Trainer trains: the table of GPUs, what a launcher started, and what cannot go together."""

import sys
from collections.abc import Iterator

import pytest
import torch
from laws.xla_world import STAND_IN

from midstride.engine.errors import JobError
from midstride.engine.ranks.devices import DeviceRequest, Hardware
from midstride.engine.ranks.placement import Placement, resolve_placement
from midstride.engine.strategies.ddp import Ddp
from midstride.engine.training.trainer import Trainer
from midstride.engine.world import World


def at(rank: int, size: int, local_size: int, launcher: str = "torchrun") -> dict[str, str]:
    """The environment of one rank."""
    world = World(rank=rank, size=size, local_rank=rank % local_size, local_size=local_size, node=rank // local_size)
    return world.environment


def in_step(rank: int, tasks: int, **more: str) -> dict[str, str]:
    """The environment of one task of a Slurm step, two on each machine."""
    place = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank % 2, "SLURM_NODEID": rank // 2, "SLURM_STEP_NUM_TASKS": tasks}
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": "2(x2)" if tasks == 4 else str(tasks)}
    return {**{name: str(value) for name, value in place.items()}, **step, **more}


#: wishes, machine -> strategy, start, ranks to start, this rank's devices
PLACES: dict[str, tuple[DeviceRequest, Hardware, tuple[str, str, int, list[str]]]] = {
    "nothing said": (DeviceRequest(), Hardware(), ("single", "none", 1, ["cpu"])),
    "nothing said, a GPU": (DeviceRequest(), Hardware(2), ("single", "none", 1, ["cuda:0"])),
    "the CPU, by name": (DeviceRequest(gpus=None), Hardware(2), ("single", "none", 1, ["cpu"])),
    "several CPUs, though there are GPUs": (
        DeviceRequest(gpus=0, devices=2),
        Hardware(4),
        ("ddp", "subprocess", 2, ["cpu"]),
    ),
    "several devices": (DeviceRequest(devices=2), Hardware(), ("ddp", "subprocess", 2, ["cpu"])),
    "several devices in a notebook": (
        DeviceRequest(devices=2),
        Hardware(interactive=True),
        ("ddp", "fork", 2, ["cpu"]),
    ),
    "GPUs by index": (DeviceRequest(gpus="1, 3"), Hardware(4), ("ddp", "subprocess", 2, ["cuda:1"])),
    "alone under torchrun": (DeviceRequest(), Hardware(0, at(0, 1, 1)), ("ddp", "none", 1, ["cpu"])),
    "under srun": (DeviceRequest(), Hardware(0, in_step(3, 4)), ("ddp", "none", 1, ["cpu"])),
    "alone under srun": (DeviceRequest(), Hardware(0, in_step(0, 1)), ("ddp", "none", 1, ["cpu"])),
    "a shell of srun's": (
        DeviceRequest(),
        Hardware(0, in_step(0, 1, SLURM_PTY_PORT="1")),
        ("single", "none", 1, ["cpu"]),
    ),
    "several devices in one task": (
        DeviceRequest(devices=2),
        Hardware(0, in_step(0, 1)),
        ("ddp", "subprocess", 2, ["cpu"]),
    ),
    "a batch script": (DeviceRequest(), Hardware(0, {"SLURM_PROCID": "0"}), ("single", "none", 1, ["cpu"])),
    "under torchrun": (DeviceRequest(), Hardware(0, at(1, 2, 2)), ("ddp", "none", 1, ["cpu"])),
    "under torchrun, GPUs": (DeviceRequest(), Hardware(2, at(1, 2, 2)), ("ddp", "none", 1, ["cuda:1"])),
    "under torchrun, GPUs by index": (
        DeviceRequest(gpus=[1, 3]),
        Hardware(4, at(1, 2, 2)),
        ("ddp", "none", 1, ["cuda:3"]),
    ),
    "under torchrun, a GPU of its own": (
        DeviceRequest(),
        Hardware(1, {**at(1, 2, 2), "CUDA_VISIBLE_DEVICES": "1"}),
        ("ddp", "none", 1, ["cuda:0"]),
    ),
    "under srun, a GPU of its own": (DeviceRequest(), Hardware(1, in_step(1, 2)), ("ddp", "none", 1, ["cuda:0"])),
    "the CPU of a machine with GPUs": (
        DeviceRequest(accelerator="cpu"),
        Hardware(1, at(1, 2, 2)),
        ("ddp", "none", 1, ["cpu"]),
    ),
    "a GPU, said so": (DeviceRequest(accelerator="gpu"), Hardware(2), ("single", "none", 1, ["cuda:0"])),
    "several on the CPU, said so": (
        DeviceRequest(accelerator="cpu", devices=2),
        Hardware(4),
        ("ddp", "subprocess", 2, ["cpu"]),
    ),
    "free GPUs under torchrun": (
        DeviceRequest(auto_select_gpus=True),
        Hardware(4, at(1, 2, 2), free_gpus=lambda: [0, 2, 3]),
        ("ddp", "none", 1, ["cuda:2"]),
    ),
    "a number of free GPUs under torchrun": (
        DeviceRequest(gpus=2, auto_select_gpus=True),
        Hardware(4, at(1, 2, 2), free_gpus=lambda: [0, 2, 3]),
        ("ddp", "none", 1, ["cuda:2"]),
    ),
    "ddp2 on GPUs by index": (
        DeviceRequest("ddp2", gpus=[0, 2, 3, 1]),
        Hardware(4, at(1, 2, 2)),
        ("ddp2", "none", 1, ["cuda:3", "cuda:1"]),
    ),
    "on the second node": (
        DeviceRequest(devices=2, num_nodes=2),
        Hardware(2, at(3, 4, 2)),
        ("ddp", "none", 1, ["cuda:1"]),
    ),
    "dp": (DeviceRequest("dp", devices=3), Hardware(), ("dp", "none", 1, ["cpu"] * 3)),
    "dp on GPUs": (DeviceRequest("dp", gpus=[0, 2]), Hardware(4), ("dp", "none", 1, ["cuda:0", "cuda:2"])),
    "ddp2 on a node": (
        DeviceRequest("ddp2", devices=2),
        Hardware(2, at(1, 2, 1)),
        ("ddp2", "none", 1, ["cuda:0", "cuda:1"]),
    ),
    "ddp2 twice on a node": (
        DeviceRequest("ddp2", devices=2),
        Hardware(4, at(1, 2, 2)),
        ("ddp2", "none", 1, ["cuda:2", "cuda:3"]),
    ),
    "cores of a TPU": (DeviceRequest(tpu_cores=8), Hardware(), ("xla", "subprocess", 8, ["cpu"])),
    "a core of a TPU, though there are GPUs": (DeviceRequest(tpu_cores=[5]), Hardware(2), ("xla", "none", 1, ["cpu"])),
    "cores of a TPU under torchrun": (
        DeviceRequest(tpu_cores="8"),
        Hardware(0, at(3, 8, 8)),
        ("xla", "none", 1, ["cpu"]),
    ),
    "XLA devices": (DeviceRequest("xla", devices=4), Hardware(4), ("xla", "subprocess", 4, ["cpu"])),
    "spawn": (DeviceRequest("ddp_spawn", devices=2), Hardware(cuda_in_use=True), ("ddp", "spawn", 2, ["cpu"])),
    "GPUs in a notebook that has not asked for CUDA": (
        DeviceRequest(gpus=2, precision="16"),
        Hardware(2, interactive=True, cannot_fork=lambda: False),
        ("ddp", "fork", 2, ["cuda:0"]),
    ),
    "GPUs nobody holds": (
        DeviceRequest(gpus=2, auto_select_gpus=True),
        Hardware(4, free_gpus=lambda: [1, 2, 3]),
        ("ddp", "subprocess", 2, ["cuda:1"]),
    ),
    "an instance": (DeviceRequest(Ddp(static_graph=True), devices=2), Hardware(), ("ddp", "subprocess", 2, ["cpu"])),
    "a path": (
        DeviceRequest("midstride.engine.strategies.ddp:Ddp", devices=2),
        Hardware(),
        ("ddp", "subprocess", 2, ["cpu"]),
    ),
}


@pytest.fixture
def torch_xla(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-in for torch_xla, or the real one, for the time of a test."""
    if STAND_IN is not None:
        monkeypatch.syspath_prepend(STAND_IN)
    yield
    for name in [name for name in sys.modules if name.startswith("torch_xla") or name.endswith("strategies.xla")]:
        del sys.modules[name]


def placed(wishes: DeviceRequest, machine: Hardware) -> Placement:
    placement, faults = resolve_placement(wishes, machine)
    assert not faults
    return placement


@pytest.mark.usefixtures("torch_xla")
@pytest.mark.parametrize("case", PLACES)
def test_a_trainer_finds_its_place(case: str) -> None:
    wishes, machine, (strategy, start, ranks, devices) = PLACES[case]
    placement = placed(wishes, machine)
    found = placement.strategy.name, placement.start, placement.ranks, [str(d) for d in placement.strategy.devices]
    assert found == (strategy, start, ranks, devices)
    assert "there is no GPU here" in placement.summary or machine.gpus or "XLA" in placement.summary


REFUSED: dict[str, tuple[DeviceRequest, Hardware, list[str]]] = {
    "16 with dp": (DeviceRequest("dp", devices=2, precision="16"), Hardware(), ["16", "dp", "bf16"]),
    "16 with ddp2": (DeviceRequest("ddp2", devices=2, precision="16"), Hardware(), ["16", "ddp2", "bf16"]),
    "horovod under torchrun": (
        DeviceRequest("horovod"),
        Hardware(environment=at(1, 4, 2)),
        ["torchrun", "horovodrun", "ddp"],
    ),
    "horovod with devices": (
        DeviceRequest("horovod", devices=2),
        Hardware(),
        ["horovodrun -np 2", "leave devices out"],
    ),
    "16 with xla": (DeviceRequest("xla", precision="16"), Hardware(), ["16", "xla", "bf16"]),
    "xla on GPUs": (DeviceRequest("xla", gpus=2), Hardware(2), ["xla", "tpu_cores", "ddp"]),
    "a core for several": (DeviceRequest("xla", {"core": 5}, devices=2), Hardware(), ["core 5", "2", "leave core out"]),
    "cores in a notebook": (DeviceRequest(tpu_cores=8), Hardware(interactive=True), ["notebook", "one core"]),
    "cores that mean nothing": (DeviceRequest(tpu_cores=5), Hardware(), ["tpu_cores=5", "1 or 8", "devices"]),
    "cores and devices": (
        DeviceRequest(tpu_cores=1, devices=1),
        Hardware(),
        ["tpu_cores=1", "devices=1", "leave one out"],
    ),
    "cores and gpus": (DeviceRequest(tpu_cores=8, gpus=0), Hardware(), ["tpu_cores=8", "gpus=0", "leave one out"]),
    "cores with ddp": (DeviceRequest("ddp", tpu_cores=8), Hardware(), ["tpu_cores=8", "ddp", "xla"]),
    "more cores than torchrun's": (DeviceRequest(tpu_cores=8), Hardware(0, at(0, 4, 4)), ["8", "torchrun", "4"]),
    "fork after CUDA was asked for": (
        DeviceRequest(gpus=2),
        Hardware(2, interactive=True, cannot_fork=lambda: True),
        ["ddp_notebook", "is_available", "PYTORCH_NVML_BASED_CUDA_CHECK=1"],
    ),
    "fork after CUDA": (DeviceRequest("ddp_fork", gpus=2), Hardware(2, cuda_in_use=True), ["CUDA", "ddp_spawn"]),
    "sync_batchnorm on the CPU": (
        DeviceRequest("ddp", {"sync_batchnorm": True}, devices=2),
        Hardware(),
        ["sync_batchnorm", "CPU", "leave it out"],
    ),
    "bf16 gradients on the CPU": (
        DeviceRequest("ddp", {"comm_hook": "bf16_compress"}, devices=2),
        Hardware(),
        ["bf16_compress", "NCCL", "fp16_compress"],
    ),
    "spawn under torchrun": (
        DeviceRequest("ddp_spawn"),
        Hardware(0, at(0, 2, 2)),
        ["ddp_spawn", "torchrun", "use ddp"],
    ),
    "spawn in a notebook": (
        DeviceRequest("ddp_spawn", devices=2),
        Hardware(interactive=True),
        ["ddp_spawn", "notebook", "ddp_notebook"],
    ),
    "a script in a notebook": (
        DeviceRequest("ddp", devices=2),
        Hardware(interactive=True),
        ["ddp", "script", "ddp_notebook"],
    ),
    "single on two": (DeviceRequest("single", devices=2), Hardware(), ["single", "2", "ddp"]),
    "dp among processes": (DeviceRequest("dp", devices=2), Hardware(0, at(0, 2, 2)), ["dp", "2", "ddp2"]),
    "another number than torchrun's": (DeviceRequest(devices=3), Hardware(0, at(0, 2, 2)), ["3", "torchrun", "2"]),
    "other nodes than torchrun's": (
        DeviceRequest(num_nodes=2),
        Hardware(0, at(0, 2, 2)),
        ["num_nodes=2", "torchrun", "1"],
    ),
    "nodes without a launcher": (DeviceRequest(num_nodes=2), Hardware(), ["num_nodes=2", "torchrun --nnodes=2"]),
    "fewer GPUs than processes": (
        DeviceRequest(),
        Hardware(2, at(2, 3, 3)),
        ["3 processes", "GPUs 0 to 1", 'accelerator="cpu"'],
    ),
    "one GPU for two processes": (
        DeviceRequest(),
        Hardware(1, at(0, 2, 2)),
        ["2 processes", "GPU 0", "start 1", "world.accelerator: cpu"],
    ),
    "a GPU where there is none": (DeviceRequest(accelerator="gpu"), Hardware(), ["accelerator", "no GPU here", "auto"]),
    "a GPU that is the CPU": (DeviceRequest(accelerator="gpu", gpus=0), Hardware(2), ["gpu", "gpus=0", "leave one"]),
    "the CPU of index 1": (DeviceRequest(accelerator="cpu", gpus=[1]), Hardware(2), ["cpu", "gpus=[1]", "leave one"]),
    "another accelerator": (DeviceRequest(accelerator="cuda"), Hardware(2), ["'cuda'", "auto, cpu and gpu"]),
    "too few free under torchrun": (
        DeviceRequest(auto_select_gpus=True),
        Hardware(4, at(1, 3, 3), free_gpus=lambda: [1, 3]),
        ["3 GPUs", "[1, 3]", "wait"],
    ),
    "gpus and devices": (DeviceRequest(gpus=1, devices=1), Hardware(2), ["gpus=1", "devices=1", "leave one out"]),
    "too few free": (
        DeviceRequest(gpus=2, auto_select_gpus=True),
        Hardware(2, free_gpus=lambda: [1]),
        ["2 GPUs", "[1]", "wait"],
    ),
    "none to choose from": (DeviceRequest(auto_select_gpus=True), Hardware(), ["auto_select_gpus", "no GPU"]),
    "chosen by name": (
        DeviceRequest(gpus=[1], auto_select_gpus=True),
        Hardware(2),
        ["auto_select_gpus", "[1]", "number"],
    ),
    "options beside an instance": (
        DeviceRequest(Ddp(), {"static_graph": True}),
        Hardware(),
        ["static_graph", "Ddp", "made"],
    ),
    "options a class does not take": (
        DeviceRequest("midstride.engine.strategies.ddp:Ddp", {"static": True}),
        Hardware(),
        ["strategy_args", "'static'"],
    ),
    "an unknown option": (DeviceRequest("ddp", {"static": True}), Hardware(), ["static", "static_graph"]),
    "an option of another kind": (DeviceRequest("ddp", {"static_graph": 1}), Hardware(), ["static_graph", "bool", "1"]),
    "an unknown hook": (
        DeviceRequest("ddp", {"comm_hook": "zip"}),
        Hardware(),
        ["comm_hook", "fp16_compress", "'zip'"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_go_together_is_refused_with_a_way_out(case: str) -> None:
    wishes, machine, words = REFUSED[case]
    _, faults = resolve_placement(wishes, machine)
    assert len(faults) == 1
    assert all(word in faults[0] for word in words), faults[0]


def test_all_faults_come_at_once() -> None:
    with pytest.raises(JobError) as caught:
        Trainer(strategy="dp", devices=2, precision=16, strategy_args={"x": 1}, max_epochs=0)
    for words in ("3 faults in Trainer(...)", "dp takes no 'x'", "precision 16 with dp", "max_epochs"):
        assert words in str(caught.value)


class Own(Ddp):
    """A strategy of a user's own."""


def test_a_class_of_ones_own_is_part_of_the_runs_identity() -> None:
    by_path = DeviceRequest("midstride.engine.strategies.ddp:Ddp", {"static_graph": True})
    assert placed(by_path, Hardware()).strategy.identity == "ddp(static_graph=True)"
    assert placed(DeviceRequest(Own(find_unused_parameters=True)), Hardware()).strategy.identity.endswith(
        "test_placement:Own(find_unused_parameters=True)"
    )
    assert placed(DeviceRequest("dp", devices=2), Hardware()).strategy.identity == "dp(devices=2)"
    assert placed(DeviceRequest("ddp_spawn", devices=2), Hardware()).strategy.identity == "ddp"


@pytest.mark.parametrize(
    ("environment", "launcher"),
    [
        (at(1, 4, 2), "torchrun"),
        (
            {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2"},
            "horovodrun",
        ),
        (
            {
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "4",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            },
            "mpirun",
        ),
        (in_step(1, 4), "srun"),
        ({**in_step(1, 4), "PMI_RANK": "1", "PMI_SIZE": "4"}, "srun"),
    ],
)
def test_a_world_is_found_whoever_started_it(environment: dict[str, str], launcher: str) -> None:
    found = World.from_environment(environment)
    assert found == World(rank=1, size=4, local_rank=1, local_size=2, node=0, launcher=launcher)
    assert found.nodes == 2


def test_devices_are_torchs() -> None:
    assert placed(DeviceRequest("dp", devices=2), Hardware()).strategy.devices == [torch.device("cpu")] * 2
