"""Limits of the architecture: who sets whose attributes, how long functions are, where library internals are used."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torchmetrics import Metric, MetricCollection, SumMetric

from midstride.engine.strategies.base import Strategy
from midstride.engine.strategies.single import Single

ROOT = Path(__file__).parents[2]
SOURCES = {
    str(path.relative_to(ROOT)): ast.parse(path.read_text())
    for package in ("engine", "tasks", "flows")
    for path in sorted((ROOT / package).rglob("*.py"))
}

#: what only looks like an attribute of ours
SET_FROM_OUTSIDE = {
    "engine/data/torch_internals.py: loader._iterator": "torch's own",
    "engine/lightning/adapt.py: owner.__class__": "Python's own",
    "engine/modules/module_state.py: module.training": "torch's own",
    "engine/modules/structure.py: tensor.data": "torch's own",
    "engine/objects/kinds/generators.py: generator.bit_generator.state": "numpy's own",
    "engine/strategies/sharded.py: tensor.data": "torch's own",
    "engine/loop/wrappers.py: ctypes.c_ssize_t.from_address(id(wrapper) + object.__basicsize__).value": "of ctypes",
    "flows/__init__.py: sys.modules[__name__].__class__": "Python's own",
    "engine/strategies/dp.py: ctx.devices": "what torch's autograd hands from forward to backward",
}
LONGEST_FUNCTION, LONGEST_CONSTRUCTOR, MOST_PARAMETERS = 45, 25, 6
MOST_MEMBERS_OF_A_STRATEGY, MOST_IGNORED_TYPES = 20, 16
#: what is larger: arguments that are given by name, where an object to hold them would have one maker and one reader
LARGE = {
    "engine/training/trainer.py: __init__": "a user's choices, completed by an editor",
    "engine/loop/loop.py: __init__": "a user's choices, completed by an editor",
    "engine/loop/loop.py: log": "Lightning's arguments",
    "engine/modules/module.py: log": "Lightning's arguments",
    "engine/modules/monitors.py: __init__": "Lightning's arguments",
    "engine/cli/fork.py: fork": "options of a command",
    "engine/cli/replay.py: replay": "options of a command",
    "flows/cli.py: deploy": "options of a command",
    "flows/deployment.py: deploy": "options of a command",
    "engine/data/dataloader_order.py: evaluation_loader": "how a loader is read",
    "engine/data/dataloader_order.py: _order": "how a loader is read",
    "engine/data/dataloader_order.py: _sample_order": "how a loader is read",
    "engine/snapshots/writer.py: __init__": "what a snapshot is written with",
    "engine/checkpointing/world_size.py: _resize": "the world before and the world now",
}


def attributes_set(tree: ast.Module) -> Iterator[ast.Attribute]:
    """Yield every attribute that is assigned, augmented, bound by a loop or a `with`, or deleted."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
            yield node


def declared(tree: ast.Module) -> set[str]:
    """Return the attributes of the classes of a file: those in their bodies, and those that they set on `self`."""
    names = {node.attr for node in attributes_set(tree) if is_own(node)}
    for kind in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for node in kind.body:
            targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def test_no_attribute_is_set_outside_the_file_of_its_class() -> None:
    ours = {file: declared(tree) for file, tree in SOURCES.items()}
    everyones = set().union(*ours.values())
    found = {
        f"{file}: {ast.unparse(node)}"
        for file, tree in SOURCES.items()
        for node in attributes_set(tree)
        if not is_own(node) and node.attr in everyones - ours[file]
    }
    assert found == set(SET_FROM_OUTSIDE)


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield every function with the file and the name by which `LARGE` knows it."""
    for file, tree in SOURCES.items():
        yield from ((f"{file}: {node.name}", node) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def lines(function: ast.FunctionDef) -> int:
    """Return the lines of a function from its first statement on, docstring aside."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def parameters(function: ast.FunctionDef) -> int:
    given = function.args
    return len([a for a in (*given.posonlyargs, *given.args, *given.kwonlyargs) if a.arg not in ("self", "cls")])


def test_functions_fit_the_eye() -> None:
    large = {
        name
        for name, function in functions()
        if lines(function) > (LONGEST_CONSTRUCTOR if function.name == "__init__" else LONGEST_FUNCTION)
        or parameters(function) > MOST_PARAMETERS
    }
    assert large == set(LARGE)
    assert sum((ROOT / file).read_text().count("# type: ignore") for file in SOURCES) <= MOST_IGNORED_TYPES


PACKAGES = [*sorted((ROOT / "engine").glob("*/__init__.py")), ROOT / "tasks/__init__.py", ROOT / "flows/__init__.py"]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.parent.name)
def test_a_package_names_its_tests(package: Path) -> None:
    """The last line of its docstring does, and its unit tests come first: `Tests: tests/unit/optim, tests/laws/...`."""
    last = (ast.get_docstring(ast.parse(package.read_text())) or "").splitlines()[-1]
    assert last.startswith(f"Tests: tests/unit/{package.parent.name}")
    folders = [ROOT / name for name in last.removeprefix("Tests: ").split(", ")]
    assert [path for path in folders if not (path.is_file() or any(path.rglob("*.py")))] == []


#: where privates of libraries are named; `test_internals.py` tries them
INTERNALS = tuple(
    f"{name}_internals.py" for name in ("torch", "torchmetrics", "prefect", "accelerate", "transformers", "lightning")
)
#: names with an underscore that are documented, or of the standard library, numpy and fsspec
NOT_TORCHS = {
    *("_shutdown", "_run_exitfuncs", "_strip_protocol", "_exit", "_replace", "_fields"),
    *("_make", "_asdict", "_inst", "_getframe", "_rand", "_config"),
}


def private_names(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield every private name that is taken from another object or module, and how it is written."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=owner, attr=name) if not is_own(node):
                yield name, f"{ast.unparse(owner)}.{name}"
            case ast.Call(func=ast.Name(id=called), args=[_, ast.Constant(str(name)), *_]) if called.endswith("attr"):
                yield name, ast.unparse(node)
            case ast.ImportFrom(module=str(module)):
                yield from ((name, f"from {module}") for name in module.split("."))
            case ast.Import(names=names):
                yield from ((name, f"import {one.name}") for one in names for name in one.name.split("."))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in NOT_TORCHS


def test_each_package_names_library_internals_in_one_file() -> None:
    torchs = {name for kind in (nn.Module, torch.Tensor, Metric, MetricCollection) for name in dir(kind)}
    torchs |= {name for made in (nn.Module(), SumMetric(), MetricCollection([])) for name in vars(made)}
    ours = set().union(*map(declared, SOURCES.values())) | {function.name for _, function in functions()}
    found = {
        f"{file}: {text}"
        for file, tree in SOURCES.items()
        if not file.endswith(INTERNALS)
        for name, text in private_names(tree)
        if is_private(name) and (name in torchs or name not in ours)
    }
    assert found == set()


#: what starts a process, or signals one that it did not start -> the files that may call it, and for what
PROCESSES = {
    "os.fork": {
        "engine/processes/supervisor.py": "the command of a world",
        "engine/processes/forked_program.py": "supervisors, and the ranks of an elastic agent, without importing torch",
        "engine/ranks/gpus.py": "to see whether a fork can use CUDA",
    },
    "multiprocessing.get_context": {
        "engine/processes/child_processes.py": "ranks and whatever else is started from a function",
        "engine/testing/ranks.py": "what the fork server imports",
    },
    "subprocess.Popen": {
        "engine/processes/supervised_process.py": "the supervisor of a world",
        "engine/processes/fork_server.py": "what supervisors are forked from",
        "engine/ranks/script_ranks.py": "the script again, as another rank",
        "engine/loggers/logger_processes.py": "what feeds a tracker",
        "flows/server.py": "a Prefect server",
    },
    "os.kill": {
        "engine/processes/lifetime.py": "signal_all: the end of every process tree",
        "engine/launch/watchdog.py": "stacks of a rank that hangs",
        "engine/fault_injection.py": "faults",
    },
    "os.killpg": {"engine/processes/supervised_process.py": "where /proc is missing"},
}


def test_processes_are_started_and_ended_in_few_files() -> None:
    found = {
        call: {file for file, tree in SOURCES.items() if call in {ast.unparse(n.func) for n in calls(tree)}}
        for call in PROCESSES
    }
    assert found == {call: set(files) for call, files in PROCESSES.items()}


def calls(tree: ast.Module) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


#: functions that walk dicts and lists in each other -> what they walk that `trees` and `arguments` do not
WALKS = {
    "engine/state/object_nodes.py: instances_in": "nodes of objects: instances and deques too",
    "engine/config/yaml_file.py: _size": "JSON, where no torch is loaded: each alias counts as a copy",
    "engine/config/arguments.py: map_texts": "JSON, where no torch is loaded",
    "engine/config/arguments.py: texts_in": "the same",
    "engine/config/arguments.py: _as_json": "the same",
    "engine/data/iterable/content_digest.py: _plain": "what a digest in snapshots is made of: kinds and keys count too",
    "engine/data/read_side_effects.py: _of_users": "nodes of objects: instances and deques too",
    "engine/data/resolve.py: _is_loader": "what was given to train on: a data module that is a dataclass is no nest",
    "engine/metrics/torchmetrics_state.py: _copied": "states of metrics: what is in a list never changes",
    "engine/metrics/values.py: numbers_in": "what a metric computed: a tensor is a nest of numbers",
    "engine/objects/kinds/tables.py: _is_kept": "parts of tables as pickle has them: each must be of a known kind",
    "engine/objects/kinds/tensors.py: tensors_in": "trees of state: nodes and deques too",
    "engine/optim/optimizers.py: _describe": "text for a message",
    "engine/optim/optimizers.py: _read": "what configure_optimizers may return, a few shapes of it",
    "engine/optim/optimizers.py: _uncast": "two trees, of which one may lack what the other has",
    "engine/state/codec.py: meet": "the document of a tree, whose dicts have tags",
    "engine/state/codec.py: value": "the same",
    "engine/state/differences.py: same_key_order": "two trees, of which the orders of keys count, and nothing else",
}


def kinds_compared(function: ast.FunctionDef) -> set[str]:
    """Return the names that a function compares types with."""
    tests = [n for n in ast.walk(function) if isinstance(n, ast.Compare)]
    tests += [n for n in ast.walk(function) if isinstance(n, ast.Call) and ast.unparse(n.func) == "isinstance"]
    return {name.id for test in tests for name in ast.walk(test) if isinstance(name, ast.Name)}


def test_nests_are_walked_in_one_place() -> None:
    """Or the table says why not: `map_leaves` and `named_leaves` walk batches, outputs and trees of state."""
    found = {
        name
        for name, function in functions()
        if f"{function.name}(" in ast.unparse(function).partition("\n")[2]
        and kinds_compared(function) & {"dict", "Mapping", "OrderedDict"}
        and kinds_compared(function) & {"list", "tuple"}
    }
    assert found == set(WALKS)


def test_a_strategy_is_small_and_knows_no_trainer() -> None:
    members = {name for name in (*vars(Strategy), *Strategy.__annotations__, *vars(Single())) if name[0] != "_"}
    assert len(members) <= MOST_MEMBERS_OF_A_STRATEGY, sorted(members)
    knowing = {
        f"{file}: {ast.unparse(node)}"
        for file, tree in SOURCES.items()
        if file.startswith("engine/strategies/")
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("trainer", "_trainer")
    }
    assert knowing == set()
