"""The private names of libraries that midstride uses exist and do what it assumes."""

import ast
import functools
import importlib.util
import inspect
import logging
import os
import signal
import threading
from collections import OrderedDict
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torchmetrics
from support.leaks import SIGNALS
from torch import Tensor, nn
from torch.distributed import HashStore
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, start_processes
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.launcher import LaunchConfig
from torch.distributed.pipelining import ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, RandomSampler, default_collate, default_convert, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from midstride.engine.data import accelerate_internals as accelerate
from midstride.engine.data import torch_internals as data
from midstride.engine.huggingface import transformers_internals as transformers
from midstride.engine.launch import torch_internals as launch
from midstride.engine.metrics import torchmetrics_internals as metrics
from midstride.engine.modules import torch_internals as modules
from midstride.engine.state import torch_internals as state
from midstride.engine.strategies import torch_internals as strategies
from midstride.tasks import prefect_internals as prefect

pytestmark = pytest.mark.fast


FILES = (accelerate, data, launch, metrics, modules, state, strategies, prefect, transformers)
#: `make test-xla` tries it: torch_xla is in an environment of its own
ELSEWHERE = {"initialize_xla"}


def test_each_name_of_a_file_of_privates_is_tried_here() -> None:
    """So this file tells of whichever versions are installed whether they still have what is taken from them."""
    tried = Path(__file__).read_text()
    names = {name for file in FILES for name in file.__all__}
    assert {name for name in names if f".{name}" not in tried} == ELSEWHERE


def _with_members() -> nn.Module:
    module = nn.BatchNorm1d(2)
    module.register_buffer("cache", torch.zeros(1), persistent=False)
    module.child = nn.Linear(1, 1)
    return module


def test_parts_of_a_module_are_changed_in_place() -> None:
    module = _with_members()
    assert list(modules.parameters_of(module)) == ["weight", "bias"]
    assert list(modules.buffers_of(module)) == ["running_mean", "running_var", "num_batches_tracked", "cache"]
    assert modules.transient_buffers(module) == {"cache"}
    modules.transient_buffers(module).discard("cache")
    modules.buffers_of(module)["cache"] = torch.ones(1)
    assert torch.equal(module.state_dict()["cache"], torch.ones(1))
    weight = modules.parameters_of(module)["weight"] = nn.Parameter(torch.zeros(2))
    assert module.weight is weight
    modules.children_of(module)["child"] = child = nn.Identity()
    assert module.child is child


def test_members_of_a_module_are_found_where_torch_keeps_them() -> None:
    module = _with_members()
    parts = [module, *module.children()]
    children, parameters, buffers, *of_child = state.members_of(parts)
    assert [*children] == ["child"]
    assert [*parameters] == ["weight", "bias"]
    assert [*buffers] == ["running_mean", "running_var", "num_batches_tracked", "cache"]
    assert [[*names] for names in of_child] == [[], ["weight", "bias"], []]
    assert state.transient_buffers_of(parts) == [{"cache"}, set()]
    assert state.has_plain_names(module, module.modules())
    named = type("Named", (nn.Linear,), {"named_parameters": lambda self, *_, **__: iter([])})(1, 1)
    assert not state.has_plain_names(named, named.modules())


class Renamed(nn.Module):
    """Saves its weight under another name, and keeps extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.extra = nn.Parameter(torch.zeros(2)), 0
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.register_load_state_dict_pre_hook(self._rename)

    @staticmethod
    def _rename(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        if f"{prefix}old" in state:
            state[f"{prefix}weight"] = state.pop(f"{prefix}old")

    def get_extra_state(self) -> int:
        return self.extra

    def set_extra_state(self, state: int) -> None:
        self.extra = state


class Own(nn.Linear):
    """Has a way of its own to load weights."""

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict({name: value + 1 for name, value in state_dict.items()}, strict, assign)


def _modules() -> dict[str, nn.Module]:
    torch.manual_seed(1)
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    posted = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    posted[1].register_load_state_dict_post_hook(lambda module, keys: keys.missing_keys.clear())
    layers = nn.ModuleDict({"a": nn.ModuleList([nn.Linear(2, 2) for _ in range(3)]), "b": nn.BatchNorm1d(2)})
    return {"layers": layers, "tied": tied, "posted": posted, "own": Own(2, 2), "renamed": nn.Sequential(Renamed())}


#: changes of a state before it is loaded; a bare dict has no versions of layers
CHANGES: dict[str, Any] = {
    "nothing": lambda state: state,
    "a name less": lambda state: state.popitem() and state,
    "a name more": lambda state: state | {"a.strange": torch.zeros(1)},
    "another shape": lambda state: state | {next(iter(state)): torch.zeros(7)},
    "an old name": lambda state: state | {"0.old": state.pop(next(iter(state)))},
    "no versions": dict,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", _modules())
def test_weights_are_loaded_as_torch_loads_them(name: str, change: str) -> None:
    expected, found = _modules()[name], _modules()[name]
    weights = expected.state_dict()
    weights.update({key: value + 3 if isinstance(value, Tensor) else 3 for key, value in weights.items()})
    weights = CHANGES[change](weights)
    memory = {key: tensor.data_ptr() for key, tensor in found.named_parameters()}

    def error(load: Any, *of: Any) -> str:
        try:
            load(*of, weights)
        except RuntimeError as error:
            return str(error)
        return ""

    assert error(modules.load_state_dict, found) == error(expected.load_state_dict)
    now, right = found.state_dict(), expected.state_dict()
    assert [*now] == [*right]
    assert all(torch.equal(torch.as_tensor(now[key]), torch.as_tensor(right[key])) for key in right)
    assert memory == {key: tensor.data_ptr() for key, tensor in found.named_parameters()}


class Wrapped(nn.Linear):
    @functools.wraps(nn.Linear._load_from_state_dict)
    def _load_from_state_dict(self, *given: Any) -> None:
        super()._load_from_state_dict(*given)


#: modules whose state or place is not torch's own business alone -> what is
USERS: dict[str, tuple[Callable[[Any], object], str]] = {
    "a method": (lambda net: net.append(Own(2, 2)), "state"),
    "a method in torch's name": (lambda net: net.append(Wrapped(2, 2)), "state"),
    "a method of one": (lambda net: setattr(net[0], "state_dict", nn.Module().state_dict), "state"),
    "extra state and a hook": (lambda net: net.append(Renamed()), "state"),
    "a hook of saving": (lambda net: net[0].register_state_dict_post_hook(lambda *_: None), "state"),
    "a hook before saving": (lambda net: net[0].register_state_dict_pre_hook(lambda *_: None), "state"),
    "a hook of loading": (lambda net: net[0].register_load_state_dict_post_hook(lambda *_: None), "state"),
    "a way to move": (
        lambda net: net.append(type("Still", (nn.Linear,), {"_apply": lambda own, *_: own})(1, 1)),
        "place",
    ),
    "a buffer elsewhere": (lambda net: net[0].register_buffer("b", torch.ones(1, device="meta")), "place"),
    "a weight elsewhere": (lambda net: setattr(net[0], "cache", nn.Parameter(torch.ones(1, device="meta"))), "place"),
}


@pytest.mark.parametrize("what", ["nothing", *USERS])
def test_modules_that_are_torchs_own_business_are_told(what: str) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.LSTM(2, 2), nn.Sequential())
    change, of = USERS.get(what, (lambda net: None, ""))
    change(net)
    assert modules.keeps_state_as_torch([*net.modules()]) == (of != "state")
    assert modules.is_on(net, torch.device("cpu")) == (of != "place")


def test_a_flipped_view_shares_the_memory() -> None:
    tensor = torch.ones(1, dtype=torch.complex64)
    for bit in ("conj", "neg"):
        view = state.flipped(tensor, bit)
        assert (view.is_conj(), view.is_neg()) == (bit == "conj", bit == "neg")
        assert view.data_ptr() == tensor.data_ptr()


def test_a_mode_sees_operations_of_both_passes() -> None:
    names = []

    class Seen(modules.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with Seen():
        torch.ones(1, requires_grad=True).exp().sin().backward()
    assert [name for name in names if name in ("exp", "sin", "cos")] == ["exp", "sin", "cos"]


def test_a_module_is_hooked_by_any_kind_of_hook_of_its_own() -> None:
    registers = ("forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook")
    for name in registers:
        module = nn.Sequential(nn.Identity())
        assert not modules.is_hooked(module)
        handle = getattr(module, f"register_{name}")(lambda *_: None)
        assert modules.is_hooked(module), name
        handle.remove()
        assert not modules.is_hooked(module)


def test_a_process_that_was_not_forked_after_cuda_can_use_it() -> None:
    assert not strategies.is_in_bad_fork()


def test_a_replica_has_dicts_of_its_own() -> None:
    module = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    replica = strategies.replica_of(module)
    assert type(replica) is nn.Sequential
    modules.children_of(replica)["0"] = nn.Identity()
    assert type(module[0]) is nn.Linear
    norm = strategies.replica_of(module[1])
    modules.buffers_of(norm)["running_mean"] = torch.ones(1)
    assert module[1].running_mean.item() == 0


def test_an_agent_starts_its_ranks_by_what_is_given(tmp_path: Path) -> None:
    asked: list[tuple[tuple[str, ...], str]] = []

    def start(command: tuple[str, ...], environment: dict[str, str]) -> None:
        asked.append((command, environment["RANK"]))

    logs = DefaultLogsSpecs(log_dir=str(tmp_path))
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    with launch.ranks_started_by(start):
        world = start_processes("rank", "true", {0: ("one",)}, {0: {"RANK": "0"}}, logs)
        result = world.wait()
    for number, handler in handlers.items():  # torch leaves its own
        signal.signal(number, handler)
    assert result is not None
    assert not result.is_failed()
    assert asked == [(("true", "one"), "0")]


def test_agents_leave_ranks_the_time_they_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(PContext.close, "__defaults__", PContext.close.__defaults__)
        patch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")
        launch.end_ranks_within(6.6)
        assert inspect.signature(PContext.close).parameters["timeout"].default == 7
        assert getattr(LaunchConfig(1, 1, 1), "shutdown_timeout", 7) == 7  # from version 2.13 on


def test_groups_of_a_world_and_their_store() -> None:
    assert strategies.groups() == []
    store = HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        beside = torch.distributed.new_group(backend="gloo", group_desc="beside")
        described = {group.group_desc: group for group in strategies.groups()}
        assert described["beside"] is beside
        assert len(described) == 2
        for group in strategies.groups():
            strategies.set_timeout(group, timedelta(seconds=7))
            assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=7)
        strategies.default_store().set("key", "value")
        assert strategies.PrefixStore("midstride/1", strategies.default_store()).num_keys() >= 0
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("reduces_in", [None, torch.float64])
def test_gradients_that_ranks_have_not_exchanged_are_seen(reduces_in: torch.dtype | None) -> None:
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        sharded: Any = fully_shard(nn.Linear(2, 1), mp_policy=MixedPrecisionPolicy(reduce_dtype=reduces_in))
        seen = [strategies.has_unreduced_gradients(sharded)]
        for is_last in (False, True):
            sharded.set_requires_gradient_sync(is_last)
            sharded(torch.ones(1, 2)).sum().backward()
            seen.append(strategies.has_unreduced_gradients(sharded))
        assert seen == [False, True, False]
    finally:
        torch.distributed.destroy_process_group()


def test_a_replica_tells_its_hooks_and_their_states() -> None:
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        replica, kept = DistributedDataParallel(nn.Linear(2, 1)), {"errors": 0}
        assert modules.gradient_hooks_of(replica) == []
        replica.register_comm_hook(kept, fp16_compress_hook)
        ((hook, given),) = modules.gradient_hooks_of(replica)
        assert hook is fp16_compress_hook
        assert given is kept
    finally:
        torch.distributed.destroy_process_group()


def test_a_compiled_wrapper_gives_its_module_and_compiler() -> None:
    layer = torch.nn.Linear(2, 2)
    assert modules.wrapped_by_compile(layer) is None
    compiled = torch.compile(layer, backend="eager")
    assert modules.uncompiled(compiled) is modules.uncompiled(layer) is layer
    found = modules.wrapped_by_compile(compiled)
    assert found is not None
    assert found[0] is layer
    assert not modules.is_compiled(layer)
    modules.compile_calls(*found)
    assert modules.is_compiled(layer)
    assert layer(torch.zeros(1, 2)).shape == (1, 2)


def test_groups_are_checked_as_they_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, str]] = []
    new = torch.distributed.distributed_c10d._new_process_group_helper
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_new_process_group_helper", new)
    strategies.check_new_groups(lambda group, store: made.append((group, strategies.file_of(store))))
    path = str(tmp_path / "store")
    store = strategies.FileStore(path, -1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        beside = torch.distributed.new_group([0])
        assert [group for group, _ in made] == [torch.distributed.group.WORLD, beside]
        assert {file for _, file in made} == {path}
        assert strategies.file_of(HashStore()) == ""
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("is_private", [True, False])
def test_ranks_that_name_no_store_meet_where_they_are_told(is_private: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    store, handlers = HashStore(), dict(torch.distributed.rendezvous.__globals__["_rendezvous_handlers"])
    monkeypatch.setitem(torch.distributed.rendezvous.__globals__, "_rendezvous_handlers", handlers)
    monkeypatch.setattr(strategies, "_rendezvous_handlers", handlers)
    strategies.meet_in(lambda: store if is_private else None)
    with mock.patch.dict(os.environ, RANK="0", WORLD_SIZE="1"):
        if not is_private:
            with pytest.raises(ValueError, match="MASTER_ADDR expected"):
                torch.distributed.init_process_group("gloo")
            return
        torch.distributed.init_process_group("gloo")
    try:
        strategies.default_store().set("here", "")
        assert store.num_keys() > 0
    finally:
        torch.distributed.destroy_process_group()


def test_stores_are_of_one_kind() -> None:
    assert issubclass(strategies.TCPStore, strategies.Store)
    assert issubclass(strategies.PrefixStore, strategies.Store)
    within = strategies.PrefixStore("round/1", store := strategies.HashStore())
    within.set("key", "value")
    assert store.get("round/1/key") == b"value"
    assert within.add("count", 2) == 2
    assert not store.check(["count"])


def test_layers_that_normalise_have_common_bases() -> None:
    kinds = nn.BatchNorm1d, nn.BatchNorm3d, nn.InstanceNorm2d, nn.SyncBatchNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm
    assert all(issubclass(kind, strategies.NORMALISATION) for kind in kinds)
    assert not isinstance(nn.Linear(1, 1), strategies.NORMALISATION)


def test_tensors_are_copied_and_measured_together() -> None:
    sources = [torch.arange(3.0), torch.ones(2, 2)]
    targets = [torch.empty_like(source) for source in sources]
    state.foreach_copy(targets, sources)
    assert all(map(torch.equal, targets, sources))
    norms = strategies.foreach_norm(sources)
    assert all(map(torch.equal, norms, map(torch.linalg.vector_norm, sources)))
    assert all(map(torch.equal, strategies.foreach_mul(sources, 0.5), [source * 0.5 for source in sources]))
    strategies.foreach_add_(targets, sources)
    assert all(map(torch.equal, targets, [source + source for source in sources]))
    version = strategies.version_of(targets[0])
    strategies.foreach_copy_(targets, sources)
    assert strategies.version_of(targets[0]) == version + 1
    assert all(map(torch.equal, targets, sources))


def test_an_uncoalesced_sparse_tensor_shows_its_values() -> None:
    twice = torch.sparse_coo_tensor([[1, 1]], [2.0, 3.0], (3,), check_invariants=True)
    indices, values = state.indices_and_values(twice)
    assert (indices.tolist(), values.tolist()) == ([[1, 1]], [2.0, 3.0])


def test_a_view_is_told_without_its_address() -> None:
    one, other = torch.zeros(4), torch.zeros(4)
    assert state.is_view_of_one(one[1:], [other, one])
    assert not state.is_view_of_one(one[1:], [other])
    assert not state.is_view_of_one(one.detach(), [one])


def test_a_process_shows_itself_as_a_worker() -> None:
    info = data.make_worker_info(id=1, num_workers=3, seed=7, dataset=[])
    data.set_worker_info(info)
    try:
        assert get_worker_info() is info
        assert data.worker_info() is info
    finally:
        data.set_worker_info(None)
    assert get_worker_info() is None


def test_tensors_are_collated_by_stacking_unless_users_say_other(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [torch.randn(3) for _ in range(4)]
    assert data.stacks_tensors(default_collate)
    assert torch.equal(default_collate(rows), torch.stack(rows))
    assert not data.stacks_tensors(default_convert)
    own: Any = lambda batch, collate_fn_map: torch.cat(batch)  # noqa: E731
    monkeypatch.setitem(default_collate_fn_map, Tensor, own)
    assert torch.equal(default_collate(rows), torch.cat(rows))
    assert not data.stacks_tensors(default_collate)


def test_a_worker_replaces_a_batch_that_cannot_be_sent() -> None:
    init: Any = lambda worker: data.replace_unsent(lambda error: type(error))  # noqa: E731
    items: Any = [1, threading.Lock(), 3]
    assert list(DataLoader(items, batch_size=None, num_workers=1, timeout=60, worker_init_fn=init)) == [1, TypeError, 3]


def test_workers_of_a_loader_end_and_are_forgotten() -> None:
    iterator = iter(DataLoader([0, 1], num_workers=1))
    (worker,) = data.workers_of(iterator)
    assert iterator._worker_pids_set
    assert data.is_loader_pass(iterator)
    assert next(iterator) is not None
    assert data.batches_read(iterator) == 1
    data.forget_workers(iterator)
    assert not iterator._worker_pids_set
    assert worker.is_alive()
    data.end_workers(iterator)
    assert not worker.is_alive()
    alone = iter(DataLoader([0, 1]))
    assert data.workers_of(alone) == []
    data.forget_workers(alone)
    data.end_workers(alone)
    keeps: DataLoader[Any] = DataLoader([0, 1], num_workers=1, persistent_workers=True)
    (worker,) = data.workers_of(kept := iter(keeps))
    for _ in range(2):
        data.end_workers(kept)
        assert not worker.is_alive()
    for _ in range(2):
        data.end_kept_pass(keeps)
    (other,) = data.workers_of(iter(keeps))
    assert other.is_alive()
    data.end_kept_pass(keeps)
    assert not other.is_alive()


def test_what_a_sampler_and_a_generator_keep() -> None:
    assert not data.has_num_samples(RandomSampler([0, 1]))
    assert data.has_num_samples(RandomSampler([0, 1], num_samples=2))
    generator = torch.Generator()
    assert data.generator_address(generator) != data.generator_address(torch.Generator())
    assert data.generator_address(generator) == data.generator_address(generator)


def test_a_metric_counts_and_is_set_back() -> None:
    metric = torchmetrics.MeanMetric()
    assert set(metrics.defaults(metric)) == set(metrics.reductions(metric)) == {"mean_value", "weight"}
    assert metrics.keeps_states(metric)
    assert set(metrics.seen_by(metric)) >= {"mean_value", "weight", "_update_count"}
    assert metrics.seen_by(metric)["mean_value"] is metric.mean_value
    assert not metrics.keeps_states(torchmetrics.MetricCollection([metric]))
    assert metrics.batch_value(metric) is None
    assert metric(3.0) == metrics.batch_value(metric) == metric.compute() == 3
    assert metrics.updates(metric) == 1
    metric.mean_value = torch.tensor(8.0)
    metrics.set_updates(metric, 5)
    assert metrics.updates(metric) == 5
    assert metric.compute() == 8  # not the value of before
    assert vars(metric).keys() - metrics.defaults(metric).keys() - metrics.SETUP <= {
        *("update", "compute", "nan_strategy", "state_name")
    }


def test_a_metric_is_made_of_how_it_is_set_up() -> None:
    used, made = torchmetrics.MeanMetric(), torchmetrics.MeanMetric.__new__(torchmetrics.MeanMetric)
    torch.nn.Module.__init__(made)
    used.update(3.0)
    how = metrics.without_seen(vars(used))

    metrics.set_anew(made)
    vars(made).update(
        {"nan_strategy": "warn"}
        | {name: how[name] for name in how.keys() - metrics.set_anew_among(how)}
        | {"_update_count": 0}
    )
    metrics.begin_anew(made)

    assert how.keys().isdisjoint({"mean_value", "weight"})
    assert not metrics.set_anew_among({"update": None})  # of no metric
    assert vars(torchmetrics.MeanMetric()).keys() - vars(made).keys() == {"state_name"}  # kept as a plain value
    assert [float(made(value)) for value in (1.0, 3.0)] == [1, 3]
    assert (metrics.updates(made), made.compute()) == (2, 2)
    assert metrics.is_kind_of_metric(torchmetrics.MeanMetric)
    assert not metrics.is_kind_of_metric(torchmetrics.MetricCollection)


def test_a_metric_meets_other_ranks_in_the_way_given() -> None:
    class Own(torchmetrics.MeanMetric):
        def _sync_dist(self, *arguments: Any, **options: Any) -> None:
            self.own = True

    assert metrics.exchanges_itself(Own())
    assert not metrics.exchanges_itself(torchmetrics.MeanMetric())
    met: list[object] = []

    def sync_dist(self: Any, dist_sync_fn: Any = None, process_group: Any = None) -> None:
        met.append(self)

    for kind in (torchmetrics.MeanMetric, Own):
        metric = kind(distributed_available_fn=lambda: True)
        metrics.sync_by(metric, sync_dist)
        metric.update(1.0)
        metric.compute()
        assert any(one is metric for one in met) is (kind is torchmetrics.MeanMetric)


def test_metrics_of_a_collection_share_as_they_did() -> None:
    def collection() -> torchmetrics.MetricCollection:
        return torchmetrics.MetricCollection(
            [torchmetrics.classification.BinaryPrecision(), torchmetrics.classification.BinaryRecall()]
        )

    used, fresh = collection(), collection()
    used.update(torch.tensor([1, 0]), torch.tensor([1, 1]))
    saved = metrics.saved_groups(used)
    assert saved["checked"]
    assert list(saved["groups"].values()) == [["BinaryPrecision", "BinaryRecall"]]
    metrics.load_groups(fresh, saved)
    assert metrics.saved_groups(fresh) == saved
    precision, recall = (used._modules[name] for name in ("BinaryPrecision", "BinaryRecall"))
    precision.tp = torch.tensor(7)  # as a lane sets it, on one of them
    metrics.link_groups(used)
    assert recall.tp is precision.tp


def test_the_end_of_a_flow_waits_for_no_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    from prefect import flow_engine

    class Engine:
        """A flow in the midst of a heartbeat."""

        heartbeat_seconds, flow_run, logger = 30, None, logging.getLogger("prefect")
        beating, over = threading.Event(), threading.Event()

        def _build_heartbeat_event_template(self) -> tuple[None, None]:
            return None, None

        def _emit_flow_run_heartbeat(self, *_: None) -> None:
            self.thread = threading.current_thread()
            self.beating.set()
            self.over.wait()

    engine: Any = Engine()
    waiting = flow_engine._send_heartbeats
    with monkeypatch.context() as patch, prefect.heartbeats_not_awaited(), flow_engine._send_heartbeats(engine):
        engine.beating.wait()
        patch.setattr(threading.Thread, "join", lambda *_, **__: pytest.fail("it was waited for"))
    assert flow_engine._send_heartbeats is waiting
    assert engine.thread.daemon
    engine.over.set()
    engine.thread.join()


def test_the_flow_around_a_flow_is_found() -> None:
    from prefect.context import FlowRunContext

    contexts = [FlowRunContext.model_construct(flow_run=None) for _ in range(2)]
    with contexts[0], contexts[1]:
        assert prefect.outer_flow(contexts[1]) is contexts[0]
        assert prefect.outer_flow(contexts[0]) is None


def test_parameters_stand_first_in_a_form() -> None:
    from prefect.deployments.runner import RunnerDeployment

    from midstride.flows.train import train

    deployment = RunnerDeployment.from_flow(train, "a")
    prefect.show_first(deployment, "run", "fork_of", "fork_step", "take_over", "none")
    form = deployment._parameter_openapi_schema.model_dump_for_openapi()["properties"]
    assert sorted(form, key=lambda name: form[name]["position"]) == ["run", "fork_of", "fork_step", "take_over", "job"]


def test_a_schedule_takes_fewer_micro_batches() -> None:
    class Recorded(ScheduleGPipe):
        def __init__(self, stage: Any, count: int) -> None:
            self._n_microbatches = count

    two = SimpleNamespace(num_stages=2)
    assert [strategies.schedule_of(Recorded, two, count)._n_microbatches for count in (1, 2, 3)] == [1, 2, 3]
    assert "in range(self._n_microbatches)" in inspect.getsource(ScheduleGPipe._step_microbatches)


def test_a_trainer_of_transformers_calls_the_overrides() -> None:
    """Its source is read: to import it takes seconds."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).with_name("trainer.py").read_text(encoding="utf-8"))
    [trainer] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Trainer"]
    theirs = {node.name: node for node in trainer.body if isinstance(node, ast.FunctionDef)}
    calls = [node for node in ast.walk(trainer) if isinstance(node, ast.Call)]
    called = {node.func.attr: node for node in calls if isinstance(node.func, ast.Attribute)}
    own = {name for name in vars(transformers.Resumable) if not name.startswith("__")} - {"epochs_trained"}
    overridden = own - {"_advance", "_end_epoch", "epoch_of_step"}
    assert overridden <= theirs.keys() & called.keys() | {"train"}
    assert {keyword.arg for keyword in called["_run_epoch"].keywords} >= {"epoch", "steps_in_epoch", "train_dataloader"}
    assert called["_run_epoch"].args == []
    counts = transformers.TrainerParts(SimpleNamespace(state=None, control=None, callback_handler=None))
    assert counts.output is None
    text = ast.unparse(trainer)
    for name in ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step", "current_flos"):
        assert f"self.{name} = " in text, name
    assert "self._get_num_items_in_batch(batch_samples, device)" in text
    assert "range(epochs_trained, num_train_epochs)" in text


def test_loaders_that_accelerate_prepared_are_known() -> None:
    prepared = pytest.importorskip("accelerate.data_loader").DataLoaderShard(range(4), batch_size=2)
    assert accelerate.is_prepared(prepared)
    assert not accelerate.is_prepared(DataLoader([0, 1]))


def test_accelerate_sees_the_end_of_a_pass() -> None:
    gradients = pytest.importorskip("accelerate.state").GradientState()
    with accelerate.accelerate_pass(lambda: 3) as current:
        assert isinstance(current, accelerate.AcceleratePass)
        assert (gradients.end_of_dataloader, gradients.remainder) == (False, 3)
        current.returns(is_last=True)
        assert gradients.end_of_dataloader
    assert not gradients.in_dataloader


class Halving(nn.Linear):
    """Its first version had weights of twice the size."""

    _version = 2

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        if local_metadata.get("version", 1) < 2:
            state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"] / 2
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


@pytest.mark.parametrize("is_plain", [True, False])
def test_weights_without_versions_are_those_of_the_present_code(is_plain: bool) -> None:
    trained, resumed = nn.Sequential(Halving(2, 2)), nn.Sequential(Halving(2, 2))
    if not is_plain:
        resumed.register_load_state_dict_post_hook(lambda *_: None)
    weights = trained.state_dict()
    old = OrderedDict(weights)
    vars(old)["_metadata"] = {}

    modules.load_state_dict(resumed, dict(weights))
    assert torch.equal(resumed[0].weight, trained[0].weight)
    modules.load_state_dict(resumed, old)
    assert torch.equal(resumed[0].weight, trained[0].weight / 2)
