"""Table of strategies: class, launcher of the ranks, options, and conflicts of each.

Reading the table imports neither torch nor any strategy's own library: an orchestrator reads jobs without them.
"""

from typing import Any

from midstride.engine.config.strategy_spec import Conflict, StrategyRequest, StrategySpec

__all__ = ["FORK_AFTER_CUDA", "STRATEGIES", "conflicts", "default_launcher"]

_ALONE = Conflict(lambda c: c.ranks > 1, "strategy single has one process, not {ranks}; for more choose ddp")
_ONE_PROCESS = Conflict(
    lambda c: c.ranks > 1,
    "strategy dp is one process that splits its batches, and this world has {ranks}: use ddp2, which is dp in each of "
    "several processes, or ddp, which has a device a process",
)
_NOT_16 = Conflict(
    lambda c: c.precision == "16",
    "precision 16 with {strategy}: autocast to float16 and its gradient scaler know one device a process, and "
    "{strategy} has several: use precision bf16, or ddp, which has one device a process",
)
_SYNC_NEEDS_GPU = Conflict(
    lambda c: bool(c.options.get("sync_batchnorm")) and c.accelerator == "cpu",
    "sync_batchnorm on the CPU: torch.nn.SyncBatchNorm exists for GPUs only: leave it out, or train on GPUs",
)
_BF16_NEEDS_GPU = Conflict(
    lambda c: c.options.get("comm_hook") == "bf16_compress" and c.accelerator == "cpu",
    "comm_hook bf16_compress on the CPU: torch has it over NCCL only: use fp16_compress, or train on GPUs",
)
_NO_SCRIPT = Conflict(
    lambda c: c.interactive and c.launcher is None and c.ranks > 1,
    "strategy {strategy} in a notebook: it runs the script again once per rank, and there is no script here: "
    "use ddp_notebook",
)
_STARTED_ALREADY = Conflict(
    lambda c: c.launcher not in (None, "midstride"),
    "strategy {strategy} starts its own processes, and {launcher} has started this one: use ddp, which joins them",
)
_SPAWN_IN_NOTEBOOK = Conflict(
    lambda c: c.interactive and c.launcher is None,
    "strategy {strategy} in a notebook: its new processes cannot import code of the notebook: use ddp_notebook",
)
FORK_AFTER_CUDA = Conflict(
    lambda c: c.cuda_in_use and c.launcher is None,
    "strategy {strategy} after CUDA was used in this process (torch.cuda.is_available() is enough): a forked process "
    "cannot use CUDA again: use ddp_spawn, or start afresh and leave CUDA alone before the fit, or set "
    "PYTORCH_NVML_BASED_CUDA_CHECK=1 before torch is imported",
)
_NO_BUCKET = Conflict(
    lambda c: type(c.options.get("bucket_cap_mb")) is int and c.options["bucket_cap_mb"] < 1,
    "strategy_args.bucket_cap_mb: a number of megabytes from 1 on is needed, not {options[bucket_cap_mb]!r}",
)

_UNKNOWN_TO_HOROVOD = Conflict(
    lambda c: c.launcher not in (None, "horovodrun", "mpirun"),
    "strategy horovod in a world that {launcher} started: Horovod finds its processes by horovodrun: start the script "
    "by horovodrun -np N --gloo python SCRIPT, or use ddp",
)
_NO_HOROVODRUN = Conflict(
    lambda c: c.launcher is None and c.ranks > 1 and c.accelerator is not None,
    "strategy horovod starts no processes itself: start the script by horovodrun -np {ranks} --gloo python SCRIPT, and "
    "leave devices out",
)

_NOT_16_ON_XLA = Conflict(
    lambda c: c.precision == "16",
    "precision 16 with xla: the 16 bits of a TPU are bfloat16, which needs no scale of the loss: use precision bf16",
)
_XLA_NOT_ON_GPUS = Conflict(
    lambda c: c.accelerator == "cuda",
    "strategy xla on GPUs: it trains on the devices that torch_xla finds: set tpu_cores or devices instead of gpus, or "
    "use ddp",
)
_ONE_CORE = Conflict(
    lambda c: c.options.get("core") is not None and c.ranks > 1,
    "strategy_args: core {options[core]!r} is for one process, and each of {ranks} has a core of its own: leave core "
    "out, or start one",
)
_XLA_IN_NOTEBOOK = Conflict(
    lambda c: c.interactive and c.launcher is None and c.ranks > 1,
    "strategy xla on several cores in a notebook: it runs the script again once per core, and there is no script "
    "here: train on one core, or in a script",
)

_NOT_16_IN_STAGES = Conflict(
    lambda c: c.precision == "16",
    "precision 16 with pipeline: a scale of the loss would have to be agreed on by all stages: use precision bf16",
)
_NO_CUT = Conflict(
    lambda c: isinstance(c.options.get("balance"), list) and not _are_counts(c.options["balance"]),
    "strategy_args.balance: layers of each stage are needed, such as [2, 3], not {options[balance]!r}",
)
_NO_COUNT = Conflict(
    lambda c: not _are_counts([c.options.get(name, 1) for name in ("stages", "micro_batches")]),
    "strategy_args: stages and micro_batches are numbers from 1 on",
)
_OTHER_STAGES = Conflict(
    lambda c: (
        isinstance(c.options.get("balance"), list) and c.options.get("stages") not in (None, len(c.options["balance"]))
    ),
    "strategy_args: stages={options[stages]!r}, and balance={options[balance]!r} has another number of them: leave "
    "stages out",
)
_NOT_SO_MANY = Conflict(
    lambda c: _knows_ranks(c) and _stages(c) not in _divisors(c.ranks),
    "strategy pipeline on {ranks} processes, strategy_args {options}: at least 2 stages are needed, and as many "
    "processes as stages, or a multiple of them",
)

_NO_SUCH_REPLICAS = Conflict(
    lambda c: _knows_ranks(c) and c.options.get("replicas", 1) not in (1, *_divisors(c.ranks)[:-1]),
    "strategy_args.replicas: {options[replicas]} with {ranks} ranks: groups of several ranks each are needed, so a "
    "divisor of the number of ranks that is smaller; for a whole copy of the weights on every rank use ddp",
)
_PARAM_DTYPE_NEEDS_BF16 = Conflict(
    lambda c: c.options.get("param_dtype") is not None and c.precision != "bf16",
    "strategy_args.param_dtype bf16 with precision {precision}: weights gathered in 16 bits are for precision bf16: "
    "choose that, or leave param_dtype out",
)
_OFFLOAD_NEEDS_GPU = Conflict(
    lambda c: bool(c.options.get("cpu_offload")) and c.accelerator == "cpu",
    "strategy_args.cpu_offload on the CPU: the weights are on the host already: leave it out, or train on GPUs",
)
_OFFLOAD_NOT_16 = Conflict(
    lambda c: bool(c.options.get("cpu_offload")) and c.precision == "16",
    "strategy_args.cpu_offload with precision 16: the scaler of gradients is for those on the GPU: use precision bf16",
)


def _knows_ranks(request: StrategyRequest) -> bool:
    """Whether the number of ranks is final. A script without known devices can start more."""
    return request.accelerator is None or request.launcher is not None or request.ranks > 1


def _are_counts(values: list[Any]) -> bool:
    return bool(values) and all(type(value) is int and value > 0 for value in values)


def _stages(request: StrategyRequest) -> Any:
    balance = request.options.get("balance")
    return request.options.get("stages") or (len(balance) if isinstance(balance, list) else request.ranks)


def _divisors(ranks: int) -> list[int]:
    """Return the divisors of a number of ranks, without 1."""
    return [number for number in range(2, ranks + 1) if ranks % number == 0]


_DDP = "midstride.engine.strategies.ddp:Ddp"
_DDP_OPTIONS: dict[str, type | tuple[str | type, ...]] = {
    "find_unused_parameters": bool,
    "static_graph": bool,
    "sync_batchnorm": bool,
    "comm_hook": ("bf16_compress", "fp16_compress"),
    "gradient_as_bucket_view": bool,
    "bucket_cap_mb": int,
}
_DDP_CONFLICTS = (_NO_BUCKET, _SYNC_NEEDS_GPU, _BF16_NEEDS_GPU)

_SHARDED_OPTIONS: dict[str, type | tuple[str | type, ...]] = {
    "blocks": bool,
    "replicas": int,
    "param_dtype": ("bf16",),
    "cpu_offload": bool,
}
_SHARDED_CONFLICTS = (_NO_SUCH_REPLICAS, _PARAM_DTYPE_NEEDS_BF16, _OFFLOAD_NEEDS_GPU, _OFFLOAD_NOT_16, _NO_SCRIPT)

_ORDERED = "midstride.engine.strategies.ordered_ddp:OrderedDdp"

STRATEGIES: dict[str, StrategySpec] = {
    "single": StrategySpec(
        "midstride.engine.strategies.single:Single",
        launcher="inline",
        conflicts=(_ALONE,),
        in_lanes=_ORDERED,
        remedy="install torch",
    ),
    "dp": StrategySpec(
        "midstride.engine.strategies.dp:Dp",
        launcher="inline",
        splits_batches=True,
        conflicts=(_ONE_PROCESS, _NOT_16),
        remedy="install torch",
    ),
    "ddp": StrategySpec(
        _DDP,
        "subprocess",
        options=_DDP_OPTIONS,
        conflicts=(*_DDP_CONFLICTS, _NO_SCRIPT),
        in_lanes=_ORDERED,
    ),
    "ddp2": StrategySpec(
        "midstride.engine.strategies.dp:Ddp2",
        splits_batches=True,
        options={name: _DDP_OPTIONS[name] for name in _DDP_OPTIONS if name != "sync_batchnorm"},
        conflicts=(_NO_BUCKET, _NOT_16, _BF16_NEEDS_GPU),
    ),
    "sharded": StrategySpec(
        "midstride.engine.strategies.sharded:Sharded",
        "subprocess",
        options=_SHARDED_OPTIONS,
        conflicts=_SHARDED_CONFLICTS,
        shards_weights=True,
    ),
    "fully_sharded": StrategySpec(
        "midstride.engine.strategies.sharded:FullySharded",
        "subprocess",
        options=_SHARDED_OPTIONS,
        conflicts=_SHARDED_CONFLICTS,
        shards_weights=True,
    ),
    "horovod": StrategySpec(
        "midstride.engine.strategies.horovod:Horovod",
        launcher="horovodrun",
        options={"scale_lr": bool},
        conflicts=(_UNKNOWN_TO_HOROVOD, _NO_HOROVODRUN),
        remedy="run `make horovod`, or deploy/horovod/install.py in an environment of your own",
    ),
    "pipeline": StrategySpec(
        "midstride.engine.strategies.pipeline.strategy:Pipeline",
        "subprocess",
        options={
            "balance": (list, "size", "time"),
            "stages": int,
            "micro_batches": int,
            "schedule": ("1f1b", "gpipe"),
            "checkpoint": bool,
        },
        conflicts=(_NO_CUT, _NO_COUNT, _OTHER_STAGES, _NOT_SO_MANY, _NOT_16_IN_STAGES, _NO_SCRIPT),
        shards_weights=True,
    ),
    "xla": StrategySpec(
        "midstride.engine.strategies.xla:Xla",
        "subprocess",
        devices="XLA devices",
        options={"core": int},
        conflicts=(_NOT_16_ON_XLA, _XLA_NOT_ON_GPUS, _ONE_CORE, _XLA_IN_NOTEBOOK),
        remedy="install the release made for your torch, such as: pip install torch==2.9.0 'torch_xla[tpu]==2.9.0'",
    ),
    "ddp_spawn": StrategySpec(
        _DDP,
        "spawn",
        options=_DDP_OPTIONS,
        conflicts=(*_DDP_CONFLICTS, _STARTED_ALREADY, _SPAWN_IN_NOTEBOOK),
        in_lanes=_ORDERED,
    ),
    "ddp_fork": StrategySpec(
        _DDP,
        "fork",
        options=_DDP_OPTIONS,
        conflicts=(*_DDP_CONFLICTS, _STARTED_ALREADY, FORK_AFTER_CUDA),
        in_lanes=_ORDERED,
    ),
    "ddp_notebook": StrategySpec(
        _DDP,
        "fork",
        options=_DDP_OPTIONS,
        conflicts=(*_DDP_CONFLICTS, _STARTED_ALREADY, FORK_AFTER_CUDA),
        in_lanes=_ORDERED,
    ),
}


def conflicts(request: StrategyRequest) -> list[str]:
    """Return a message for every conflict in `request`, whose strategy is a name in the table."""
    row = STRATEGIES[request.strategy]
    faults = [
        fault for name, value in request.options.items() if (fault := _option_error(request.strategy, name, value))
    ]
    return faults + [c.message.format_map(vars(request)) for c in row.conflicts if c.applies(request)]


def _option_error(strategy: str, name: str, value: object) -> str:
    options = STRATEGIES[strategy].options
    if name not in options:
        known = f"it takes {', '.join(sorted(options))}" if options else "it takes none"
        return f"strategy_args: {strategy} takes no {name!r}; {known}"
    wanted = options[name]
    if isinstance(wanted, tuple):
        right = type(value) in wanted or (isinstance(value, str) and value in wanted)
        wanted_text = f"one of {', '.join(one if isinstance(one, str) else f'a {one.__name__}' for one in wanted)}"
    else:
        right, wanted_text = type(value) is wanted, f"a {wanted.__name__}"
    return "" if right else f"strategy_args.{name}: {wanted_text} is needed, not {value!r}"


def default_launcher(strategy: str) -> str:
    """Return the name of the launcher that `strategy` uses when none is chosen."""
    return STRATEGIES[strategy].launcher if strategy in STRATEGIES else "torchrun"
