"""Which numbers of machines will do, and what is said of those that will not."""

import pytest
from pydantic import ValidationError

from midstride.engine.config.nodes import Nodes
from midstride.engine.config.world import WorldOptions
from midstride.engine.config.yaml_file import parse_yaml

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("text", "processes", "lanes", "usable"),
    [
        ("1", 3, None, [1]),
        ("4", 3, None, [4]),
        ("1:4", 2, 8, [1, 2, 4]),
        ("2:3", 1, 4, [2]),
        ("1:8", 1, 4, [1, 2, 4]),
        ("3", 1, 4, []),
        ("1:4", 1, None, []),
    ],
)
def test_which_numbers_of_nodes_will_do(text: str, processes: int, lanes: int | None, usable: list[int]) -> None:
    nodes = Nodes.parse(text, processes=processes, lanes=lanes)
    assert nodes.usable == usable
    assert bool(nodes.errors) == (not usable)
    for ready, line in enumerate(nodes.sentences(), nodes.least):
        assert line.endswith("will do") == (ready in usable)


def test_it_is_said_of_each_number_whether_it_will_do() -> None:
    assert Nodes.parse("1:4", processes=2, lanes=8).sentences() == [
        "1 node (2 ranks) will do",
        "2 nodes (4 ranks) will do",
        "3 nodes (6 ranks) cannot share 8 lanes: 2 nodes of them train, the rest wait",
        "4 nodes (8 ranks) will do",
    ]
    assert Nodes.parse("1:4", batch=12).usable == [1, 2, 3, 4]
    assert Nodes.parse("2:3", processes=2, batch=8).sentences() == [
        "2 nodes (4 ranks) will do",
        "3 nodes (6 ranks) cannot share batches of 8 samples: 2 nodes of them train, the rest wait",
    ]


@pytest.mark.parametrize(
    ("world", "fault"),
    [
        (
            "{strategy: ddp, nodes: '2'}",
            "nodes that join need an address: set rendezvous: HOST:PORT, by which they reach this machine, such "
            "as rendezvous: head:29400",
        ),
        (
            "{strategy: ddp, nodes: '1:3', processes: 2, rendezvous: 'head:1'}",
            "nodes 1:3 without lanes: the number of samples per step would depend on the number of machines: set "
            "lanes, such as lanes: 8, or the samples per step, such as global_batch_size: 12, or one number of "
            'machines: nodes: "3"',
        ),
        (
            "{strategy: ddp, nodes: '3:3', lanes: 8, rendezvous: 'head:1'}",
            "nodes 3:3 of 1 processes: no number of them can share 8 lanes: ranks that can are 1, 2, 4, 8",
        ),
        (
            "{strategy: ddp, nodes: '3', processes: 2, global_batch_size: 8, rendezvous: 'head:1'}",
            "nodes 3:3 of 2 processes: no number of them can share batches of 8 samples: ranks that can are 1, 2, 4, 8",
        ),
        (
            "{strategy: ddp, processes: 3, global_batch_size: 8}",
            "3 processes cannot share batches of 8 samples: 1, 2, 4, 8 can",
        ),
        (
            "{strategy: ddp, processes: 2, lanes: 2, global_batch_size: 8}",
            "global_batch_size 8 with lanes, each of which has the loader's batch_size: leave one out",
        ),
        (
            "{strategy: horovod, nodes: '2', rendezvous: 'head:1'}",
            "nodes that join with strategy horovod: horovodrun starts it: use ddp",
        ),
        (
            "{strategy: ddp, nodes: '2', launcher: torchrun}",
            "nodes 2 with launcher torchrun, which starts one machine: leave it out",
        ),
        (
            "{strategy: ddp, rendezvous: 'head:1'}",
            'rendezvous head:1 is for nodes that join: set nodes: "2", or leave it out',
        ),
        ("{node_timeout_s: 20}", 'node_timeout_s 20.0 is for nodes that join: set nodes: "2", or leave it out'),
        (
            "{strategy: ddp, processes: 2, grow_after_s: null}",
            'grow_after_s None is for nodes that join: set nodes: "2", or leave it out',
        ),
        ("{strategy: ddp, nodes: '2:1', rendezvous: 'head:1'}", "nodes 2:1: at least 2 and at most 1 is no range"),
        (
            "{strategy: ddp, nodes: '2', on: slurm, on_args: {array: 0-3}}",
            "on_args: array is set for sbatch by midstride: set world.nodes",
        ),
        (
            "{strategy: ddp, nodes: '2', on: slurm, on_args: {gres: [gpu, 2], -p: gpu}}",
            "on_args: gres should be text, a number or true, not ['gpu', 2]; '-p' is no long option of sbatch, such "
            "as partition or gpus_per_node",
        ),
        (
            "{strategy: ddp, nodes: '2', on: ray, on_args: {resource: {GPU: 2}}}",
            "on_args.resource: is unknown, did you mean resources?",
        ),
        (
            "{strategy: ddp, nodes: '2', rendezvous: 'head:1', on_args: {partition: gpu}}",
            "on_args without on: set on: slurm or on: ray or on: kubernetes",
        ),
        (
            "{strategy: ddp, nodes: '2', on: kubernetes, on_args: {images: a}}",
            "on_args.images: is unknown, did you mean image?",
        ),
        (
            "{strategy: ddp, launcher: torchrun, on: slurm}",
            "on slurm with launcher torchrun, which starts the ranks on this machine: leave it out",
        ),
    ],
)
def test_a_fault_says_the_way_out(world: str, fault: str) -> None:
    with pytest.raises(ValidationError) as refused:
        WorldOptions.model_validate(parse_yaml(world))
    assert [error["msg"] for error in refused.value.errors()] == [f"Value error, {fault}"]
