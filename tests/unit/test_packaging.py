"""The project as a package: what is installed, what imports what, and whether what is written about it holds."""

import doctest
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PARTS = ("engine", "flows", "tasks")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def modules(*parts: str) -> list[str]:
    """Return the names of all modules of `parts`, as they are imported."""
    found = []
    for part in parts:
        for path in sorted((ROOT / part).rglob("*.py")):
            name = ".".join(("midstride", *path.relative_to(ROOT).with_suffix("").parts))
            found.append(name.removesuffix(".__init__"))
    return found


def after_importing(names: list[str]) -> set[str]:
    """Return what a fresh interpreter has loaded once it has imported `names`."""
    program = f"import sys\nfor name in {names!r}: __import__(name)\nprint(*sys.modules, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_the_package_list_names_every_folder():
    folders = {
        ".".join(("midstride", *init.parent.relative_to(ROOT).parts))
        for part in PARTS
        for init in (ROOT / part).rglob("__init__.py")
    }
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == folders


def test_every_folder_with_modules_is_a_package():
    for part in PARTS:
        for path in (ROOT / part).rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), f"{path.parent} has modules but no __init__.py"


@pytest.mark.parametrize("part", PARTS)
def test_types_are_shipped_and_seen(part: str):
    assert (ROOT / part / "py.typed").exists()
    assert (ROOT / ".types/midstride" / part).resolve() == ROOT / part


def test_what_is_imported_is_this_checkout():
    import midstride.engine

    assert Path(midstride.engine.__file__ or "").parent == ROOT / "engine"


#: library that need not be installed -> the one module that loads it
EXTRAS = {"horovod": "midstride.engine.strategies.horovod"}


def test_the_engine_loads_no_orchestrator():
    engine = [name for name in modules("engine") if not name.endswith("__main__")]
    loaded = after_importing([name for name in engine if name not in EXTRAS.values()])
    assert not loaded & {"prefect", "fastapi", "torch_xla", "airflow", *EXTRAS}
    for library, module in EXTRAS.items():
        loaded = after_importing([module])
        assert library in loaded
        assert not loaded & {"prefect", "fastapi", "torch_xla", "airflow"}


def test_a_job_is_read_without_torch():
    loaded = after_importing(["midstride.engine", "midstride.engine.job", "midstride.engine.strategies"])
    assert not loaded & {"torch", "prefect"}


def test_tasks_and_flows_load_no_torch():
    assert "torch" not in after_importing(modules("flows", "tasks"))


def test_every_public_name_of_the_engine_can_be_had():
    import midstride.engine

    for name in midstride.engine.__all__:
        assert getattr(midstride.engine, name).__name__ == name


def test_the_version_is_the_installed_one():
    assert importlib.metadata.version("midstride") == PROJECT["project"]["version"]


def test_the_constraints_pin_everything_that_is_named():
    named = [*PROJECT["project"]["dependencies"], *PROJECT["dependency-groups"]["dev"]]
    named += [name for extra in PROJECT["project"]["optional-dependencies"].values() for name in extra]
    pinned = re.findall(r"^([a-z0-9-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert {re.split(r"[^A-Za-z0-9._-]", name)[0].lower().replace("_", "-") for name in named} <= set(pinned)


@pytest.mark.parametrize("name", [name for name in modules(*PARTS) if not name.endswith("__main__")])
def test_doctests(name: str):
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0


def test_one_thread():
    import torch

    assert os.environ["OMP_NUM_THREADS"] == "1"
    assert torch.get_num_threads() == 1


# What is written about the project.

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
page = pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))


def blocks(page: Path, language: str) -> Iterator[str]:
    yield from re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


@page
def test_links_lead_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not re.match(r"[a-z]+:|#", target):
            path = target.partition("#")[0]
            assert (page.parent / path).exists(), f"{page.name} links to {path}, which is not there"


@page
def test_make_targets_exist(page: Path):
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for block in blocks(page, "sh"):
        for target in re.findall(r"^make ([a-z-]+)", block, re.MULTILINE):
            assert target in targets


@page
def test_jobs_are_valid(page: Path, tmp_path: Path):
    from midstride.engine.job import TrainingJob

    for number, block in enumerate(blocks(page, "yaml")):
        if "module" in yaml.safe_load(block):
            path = tmp_path / f"{number}.yaml"
            path.write_text(block)
            TrainingJob.load(path)


@page
def test_python_blocks_run(page: Path):
    """The blocks of a page are one program, which a reader may paste into a file."""
    if program := "\n".join(blocks(page, "python")):
        Path("page.py").write_text(program)
        done = subprocess.run([sys.executable, "page.py"], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
