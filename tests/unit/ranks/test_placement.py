"""Where a Trainer trains: the table of GPUs, and what a launcher started."""

import sys
from collections.abc import Iterator

import pytest
import torch
from laws.horovod_world import needs_horovod
from laws.xla_world import STAND_IN
from support.launched import at, in_step

from midstride.engine.errors import JobError
from midstride.engine.ranks.devices import DeviceRequest, Hardware
from midstride.engine.ranks.placement import Placement, resolve_placement
from midstride.engine.strategies.ddp import Ddp
from midstride.engine.training.trainer import Trainer
from midstride.engine.world import World

IN_HOROVODRUN = {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "CROSS_RANK": "0", "CROSS_SIZE": "1"}

Wish = DeviceRequest
#: wishes, machine -> strategy, start, ranks to start, this rank's devices
PLACEMENTS: dict[str, tuple[DeviceRequest, Hardware, str]] = {
    "nothing said": (Wish(), Hardware(), "single none 1 cpu"),
    "nothing said, a GPU": (Wish(), Hardware(2), "single none 1 cuda:0"),
    "the CPU, by name": (Wish(gpus=None), Hardware(2), "single none 1 cpu"),
    "several CPUs, though there are GPUs": (Wish(gpus=0, devices=2), Hardware(4), "ddp subprocess 2 cpu"),
    "several devices": (Wish(devices=2), Hardware(), "ddp subprocess 2 cpu"),
    "several devices in a notebook": (Wish(devices=2), Hardware(interactive=True), "ddp fork 2 cpu"),
    "GPUs by index": (Wish(gpus="1, 3"), Hardware(4), "ddp subprocess 2 cuda:1"),
    "alone under torchrun": (Wish(), Hardware(0, at(0, 1, 1)), "ddp none 1 cpu"),
    "under srun": (Wish(), Hardware(0, in_step(3, 4)), "ddp none 1 cpu"),
    "alone under srun": (Wish(), Hardware(0, in_step(0, 1)), "ddp none 1 cpu"),
    "a shell of srun's": (Wish(), Hardware(0, in_step(0, 1, SLURM_PTY_PORT="1")), "single none 1 cpu"),
    "several devices in one task": (Wish(devices=2), Hardware(0, in_step(0, 1)), "ddp subprocess 2 cpu"),
    "a batch script": (Wish(), Hardware(0, {"SLURM_PROCID": "0"}), "single none 1 cpu"),
    "alone, though another size is set": (Wish("single"), Hardware(0, {"WORLD_SIZE": "2"}), "single none 1 cpu"),
    "several devices, and their number is set": (
        Wish(devices=2),
        Hardware(0, {"WORLD_SIZE": "2"}),
        "ddp subprocess 2 cpu",
    ),
    "a world of one, half said": (Wish(), Hardware(0, {"WORLD_SIZE": "1"}), "single none 1 cpu"),
    "under torchrun": (Wish(), Hardware(0, at(1, 2, 2)), "ddp none 1 cpu"),
    "under torchrun, GPUs": (Wish(), Hardware(2, at(1, 2, 2)), "ddp none 1 cuda:1"),
    "under torchrun, GPUs by index": (Wish(gpus=[1, 3]), Hardware(4, at(1, 2, 2)), "ddp none 1 cuda:3"),
    "under torchrun, a GPU of its own": (
        Wish(),
        Hardware(1, {**at(1, 2, 2), "CUDA_VISIBLE_DEVICES": "1"}),
        "ddp none 1 cuda:0",
    ),
    "under torchrun, of the GPUs that are left visible": (
        Wish(),
        Hardware(2, {**at(1, 2, 2), "CUDA_VISIBLE_DEVICES": "1,3"}),
        "ddp none 1 cuda:1",
    ),
    "under horovodrun": (
        Wish(),
        Hardware(0, {f"HOROVOD_{name}": value for name, value in IN_HOROVODRUN.items()}),
        "horovod none 1 cpu",
    ),
    "under srun, a GPU of its own": (Wish(), Hardware(1, in_step(1, 2)), "ddp none 1 cuda:0"),
    "the CPU of a machine with GPUs": (Wish(accelerator="cpu"), Hardware(1, at(1, 2, 2)), "ddp none 1 cpu"),
    "a GPU, said so": (Wish(accelerator="gpu"), Hardware(2), "single none 1 cuda:0"),
    "several on the CPU, said so": (Wish(accelerator="cpu", devices=2), Hardware(4), "ddp subprocess 2 cpu"),
    "free GPUs under torchrun": (
        Wish(auto_select_gpus=True),
        Hardware(4, at(1, 2, 2), free_gpus=lambda: [0, 2, 3]),
        "ddp none 1 cuda:2",
    ),
    "a number of free GPUs under torchrun": (
        Wish(gpus=2, auto_select_gpus=True),
        Hardware(4, at(1, 2, 2), free_gpus=lambda: [0, 2, 3]),
        "ddp none 1 cuda:2",
    ),
    "ddp2 on GPUs by index": (Wish("ddp2", gpus=[0, 2, 3, 1]), Hardware(4, at(1, 2, 2)), "ddp2 none 1 cuda:3 cuda:1"),
    "on the second node": (Wish(devices=2, num_nodes=2), Hardware(2, at(3, 4, 2)), "ddp none 1 cuda:1"),
    "dp": (Wish("dp", devices=3), Hardware(), "dp none 1 cpu cpu cpu"),
    "dp on GPUs": (Wish("dp", gpus=[0, 2]), Hardware(4), "dp none 1 cuda:0 cuda:2"),
    "ddp2 on a node": (Wish("ddp2", devices=2), Hardware(2, at(1, 2, 1)), "ddp2 none 1 cuda:0 cuda:1"),
    "ddp2 twice on a node": (Wish("ddp2", devices=2), Hardware(4, at(1, 2, 2)), "ddp2 none 1 cuda:2 cuda:3"),
    "cores of a TPU": (Wish(tpu_cores=8), Hardware(), "xla subprocess 8 cpu"),
    "a core of a TPU, though there are GPUs": (Wish(tpu_cores=[5]), Hardware(2), "xla none 1 cpu"),
    "cores of a TPU under torchrun": (Wish(tpu_cores="8"), Hardware(0, at(3, 8, 8)), "xla none 1 cpu"),
    "XLA devices": (Wish("xla", devices=4), Hardware(4), "xla subprocess 4 cpu"),
    "spawn": (Wish("ddp_spawn", devices=2), Hardware(cuda_in_use=True), "ddp spawn 2 cpu"),
    "GPUs in a notebook that has not asked for CUDA": (
        Wish(gpus=2, precision="16"),
        Hardware(2, interactive=True, cannot_fork=lambda: False),
        "ddp fork 2 cuda:0",
    ),
    "GPUs that are free": (
        Wish(gpus=2, auto_select_gpus=True),
        Hardware(4, free_gpus=lambda: [1, 2, 3]),
        "ddp subprocess 2 cuda:1",
    ),
    "GPUs that the script's first process chose": (
        Wish(gpus=2, auto_select_gpus=True),
        Hardware(4, {**at(1, 2, 2), World.STARTED: "2,3"}, free_gpus=lambda: [0, 1]),
        "ddp none 1 cuda:3",
    ),
    "an instance": (Wish(Ddp(static_graph=True), devices=2), Hardware(), "ddp subprocess 2 cpu"),
    "a path": (Wish("midstride.engine.strategies.ddp:Ddp", devices=2), Hardware(), "ddp subprocess 2 cpu"),
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
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[needs_horovod] * ("horovod" in found)) for case, (_, _, found) in PLACEMENTS.items()],
)
def test_a_trainer_finds_its_devices(case: str) -> None:
    wishes, machine, expected = PLACEMENTS[case]
    placement = placed(wishes, machine)
    found = placement.strategy.name, placement.start, placement.ranks, *placement.strategy.devices
    assert " ".join(map(str, found)) == expected
    assert "there is no GPU here" in placement.summary or machine.gpus or "XLA" in placement.summary


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


def test_devices_are_torchs() -> None:
    assert placed(DeviceRequest("dp", devices=2), Hardware()).strategy.devices == [torch.device("cpu")] * 2
