import torch.distributed as dist
from torch_xla._internal import pjrt


def world_size() -> int:
    return dist.get_world_size() if pjrt.processes > 1 else 1


def device_type() -> str:
    return "CPU"
