"""What strategies over several processes cannot hold of a module is named before anything starts."""

from typing import Any

import pytest
import torch
from laws.horovod_world import HOROVOD
from torch import Tensor, nn

from midstride.engine import TrainingModule
from midstride.engine.strategies.build_strategy import build_strategy
from midstride.engine.world import World

pytestmark = pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")

SEVERAL = ["ddp", "ddp_spawn", "ddp_fork", "ddp_notebook", "ddp2", HOROVOD, "sharded", "fully_sharded", "pipeline"]


class Neighbours(nn.Module):
    """A layer that knows its graph, as a sparse buffer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        graph = torch.eye(4)
        self.register_buffer("graph", graph.to_sparse() if kind == "coo" else graph.to_sparse_csr())


class Deep(TrainingModule):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.sequential_module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), *layers)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise NotImplementedError

    def training_step_end(self, outputs: Any, batch: Any = None) -> Tensor:
        raise NotImplementedError


def errors(name: str, module: TrainingModule, size: int, **options: Any) -> str:
    strategy = build_strategy(name, **options)
    strategy.attach(World(size=size, local_size=size), [torch.device("cpu")])
    return "\n".join(strategy.module_errors(module))


FAULTS: dict[str, tuple[Any, list[str]]] = {
    "a sparse buffer": (lambda: Neighbours("coo"), ["sequential_module.2.graph", "sparse tensor", "plain attribute"]),
    "compressed rows": (lambda: Neighbours("csr"), ["sequential_module.2.graph", "sparse tensor"]),
    "an embedding that scales": (lambda: nn.Embedding(4, 4, max_norm=1.0), ["2", "max_norm"]),
    "bags that scale": (lambda: nn.EmbeddingBag(4, 4, max_norm=1.0), ["2", "max_norm"]),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", SEVERAL)
def test_it_is_named_by_every_strategy_over_several_processes(name: str, fault: str) -> None:
    layer, words = FAULTS[fault]
    several = {"options": {"stages": 2}} if name == "pipeline" else {}
    said = errors(name, Deep(layer()), 4, **several)
    assert all(word in said for word in words), said
    assert not errors(name, Deep(nn.Embedding(4, 4)), 4, **several)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("size", [1, 2])
def test_lanes_name_it_on_any_number_of_processes(size: int, fault: str) -> None:
    layer, words = FAULTS[fault]
    said = errors("ddp", Deep(layer()), size, lanes=4)
    assert all(word in said for word in words), said


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ["single", "dp", "ddp", HOROVOD])
def test_one_process_takes_it(name: str, fault: str) -> None:
    assert not errors(name, Deep(FAULTS[fault][0]()), 1)
