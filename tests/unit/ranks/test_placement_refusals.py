"""What a Trainer was asked for and cannot go together is refused, with a way out."""

import pytest
from support.launched import at

from midstride.engine.ranks.devices import DeviceRequest, Hardware
from midstride.engine.ranks.placement import resolve_placement
from midstride.engine.strategies.ddp import Ddp

Wish = DeviceRequest
#: wishes, machine -> what the message names
REFUSED: dict[str, tuple[DeviceRequest, Hardware, list[str]]] = {
    "16 with dp": (Wish("dp", devices=2, precision="16"), Hardware(), ["16", "dp", "bf16"]),
    "16 with ddp2": (Wish("ddp2", devices=2, precision="16"), Hardware(), ["16", "ddp2", "bf16"]),
    "horovod under torchrun": (Wish("horovod"), Hardware(environment=at(1, 4, 2)), ["torchrun", "horovodrun", "ddp"]),
    "horovod with devices": (Wish("horovod", devices=2), Hardware(), ["horovodrun -np 2", "leave devices out"]),
    "16 with xla": (Wish("xla", precision="16"), Hardware(), ["16", "xla", "bf16"]),
    "xla on GPUs": (Wish("xla", gpus=2), Hardware(2), ["xla", "tpu_cores", "ddp"]),
    "a core for several": (Wish("xla", {"core": 5}, devices=2), Hardware(), ["core 5", "2", "leave core out"]),
    "cores in a notebook": (Wish(tpu_cores=8), Hardware(interactive=True), ["notebook", "one core"]),
    "cores that mean nothing": (Wish(tpu_cores=5), Hardware(), ["tpu_cores=5", "1 or 8", "devices"]),
    "cores and devices": (Wish(tpu_cores=1, devices=1), Hardware(), ["tpu_cores=1", "devices=1", "leave one out"]),
    "cores and gpus": (Wish(tpu_cores=8, gpus=0), Hardware(), ["tpu_cores=8", "gpus=0", "leave one out"]),
    "cores with ddp": (Wish("ddp", tpu_cores=8), Hardware(), ["tpu_cores=8", "ddp", "xla"]),
    "more cores than torchrun's": (Wish(tpu_cores=8), Hardware(0, at(0, 4, 4)), ["8", "torchrun", "4"]),
    "fork after CUDA was asked for": (
        Wish(gpus=2),
        Hardware(2, interactive=True, cannot_fork=lambda: True),
        ["ddp_notebook", "is_available", "PYTORCH_NVML_BASED_CUDA_CHECK=1"],
    ),
    "fork after CUDA": (Wish("ddp_fork", gpus=2), Hardware(2, cuda_in_use=True), ["CUDA", "ddp_spawn"]),
    "sync_batchnorm on the CPU": (
        Wish("ddp", {"sync_batchnorm": True}, devices=2),
        Hardware(),
        ["sync_batchnorm", "CPU", "leave it out"],
    ),
    "bf16 gradients on the CPU": (
        Wish("ddp", {"comm_hook": "bf16_compress"}, devices=2),
        Hardware(),
        ["bf16_compress", "NCCL", "fp16_compress"],
    ),
    "spawn under torchrun": (Wish("ddp_spawn"), Hardware(0, at(0, 2, 2)), ["ddp_spawn", "torchrun", "use ddp"]),
    "spawn in a notebook": (
        Wish("ddp_spawn", devices=2),
        Hardware(interactive=True),
        ["ddp_spawn", "notebook", "ddp_notebook"],
    ),
    "a script in a notebook": (Wish("ddp", devices=2), Hardware(interactive=True), ["ddp", "script", "ddp_notebook"]),
    "single on two": (Wish("single", devices=2), Hardware(), ["single", "2", "ddp"]),
    "dp among processes": (Wish("dp", devices=2), Hardware(0, at(0, 2, 2)), ["dp", "2", "ddp2"]),
    "another number than torchrun's": (Wish(devices=3), Hardware(0, at(0, 2, 2)), ["3", "torchrun", "2"]),
    "other nodes than torchrun's": (Wish(num_nodes=2), Hardware(0, at(0, 2, 2)), ["num_nodes=2", "torchrun", "1"]),
    "a size without a rank": (
        Wish("ddp"),
        Hardware(0, {"WORLD_SIZE": "2"}),
        ["WORLD_SIZE is 2, and RANK is not set", "unset WORLD_SIZE"],
    ),
    "a rank without a size": (
        Wish(),
        Hardware(0, {"RANK": "1"}),
        ["RANK is 1, and WORLD_SIZE is not set", "unset RANK"],
    ),
    "nodes without a launcher": (Wish(num_nodes=2), Hardware(), ["num_nodes=2", "torchrun --nnodes=2"]),
    "fewer GPUs than processes": (
        Wish(),
        Hardware(2, at(2, 3, 3)),
        ["3 processes", "GPUs 0 to 1", 'accelerator="cpu"'],
    ),
    "one GPU for two processes": (
        Wish(),
        Hardware(1, at(0, 2, 2)),
        ["2 processes", "GPU 0", "start 1", "world.accelerator: cpu"],
    ),
    "a GPU where there is none": (Wish(accelerator="gpu"), Hardware(), ["accelerator", "no GPU here", "auto"]),
    "a GPU that is the CPU": (Wish(accelerator="gpu", gpus=0), Hardware(2), ["gpu", "gpus=0", "leave one"]),
    "the CPU of index 1": (Wish(accelerator="cpu", gpus=[1]), Hardware(2), ["cpu", "gpus=[1]", "leave one"]),
    "another accelerator": (Wish(accelerator="cuda"), Hardware(2), ["'cuda'", "auto, cpu and gpu"]),
    "too few free under torchrun": (
        Wish(auto_select_gpus=True),
        Hardware(4, at(1, 3, 3), free_gpus=lambda: [1, 3]),
        ["3 GPUs", "[1, 3]", "wait"],
    ),
    "gpus and devices": (Wish(gpus=1, devices=1), Hardware(2), ["gpus=1", "devices=1", "leave one out"]),
    "too few free": (
        Wish(gpus=2, auto_select_gpus=True),
        Hardware(2, free_gpus=lambda: [1]),
        ["2 GPUs", "[1]", "wait"],
    ),
    "none to choose from": (Wish(auto_select_gpus=True), Hardware(), ["auto_select_gpus", "no GPU"]),
    "chosen by name": (Wish(gpus=[1], auto_select_gpus=True), Hardware(2), ["auto_select_gpus", "[1]", "number"]),
    "options beside an instance": (Wish(Ddp(), {"static_graph": True}), Hardware(), ["static_graph", "Ddp", "made"]),
    "options a class does not take": (
        Wish("midstride.engine.strategies.ddp:Ddp", {"static": True}),
        Hardware(),
        ["strategy_args", "'static'"],
    ),
    "an unknown option": (Wish("ddp", {"static": True}), Hardware(), ["static", "static_graph"]),
    "an option of another kind": (Wish("ddp", {"static_graph": 1}), Hardware(), ["static_graph", "bool", "1"]),
    "an unknown hook": (Wish("ddp", {"comm_hook": "zip"}), Hardware(), ["comm_hook", "fp16_compress", "'zip'"]),
    "a bucket for nothing": (
        Wish("ddp_fork", {"bucket_cap_mb": 0}),
        Hardware(),
        ["bucket_cap_mb", "megabytes", "not 0"],
    ),
    "replicas of one rank each": (
        Wish("sharded", {"replicas": 3}, devices=3),
        Hardware(),
        ["replicas: 3", "3 ranks", "ddp"],
    ),
    "replicas that do not divide": (
        Wish("fully_sharded", {"replicas": 4}),
        Hardware(0, at(0, 6, 6)),
        ["replicas: 4", "6 ranks", "divisor"],
    ),
    "16 bits gathered in 32": (
        Wish("sharded", {"param_dtype": "bf16"}),
        Hardware(0, at(0, 2, 2)),
        ["param_dtype", "precision 32", "precision bf16"],
    ),
    "offload to where it is": (
        Wish("fully_sharded", {"cpu_offload": True}),
        Hardware(0, at(0, 2, 2)),
        ["cpu_offload", "CPU", "leave it out"],
    ),
    "offload with a scaler": (
        Wish("fully_sharded", {"cpu_offload": True}, precision="16"),
        Hardware(2, at(0, 2, 2)),
        ["cpu_offload", "precision 16", "bf16"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_go_together_is_refused_with_a_way_out(case: str) -> None:
    wishes, machine, words = REFUSED[case]
    _, faults = resolve_placement(wishes, machine)
    assert len(faults) == 1
    assert all(word in faults[0] for word in words), faults[0]
