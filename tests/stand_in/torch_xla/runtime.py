import os

from torch_xla._internal import pjrt


def world_size() -> int:
    return int(os.environ["WORLD_SIZE"]) if pjrt.processes > 1 else 1  # known without a process group


def device_type() -> str:
    return "CPU"
