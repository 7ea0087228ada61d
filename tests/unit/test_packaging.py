"""The project as a package: what is installed, and what imports what."""

import doctest
import importlib.metadata
import os
import pydoc
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from urllib.parse import quote

import pytest
from laws.horovod_world import needs_horovod

ROOT = Path(__file__).parents[2]
PARTS = ("engine", "flows", "tasks")
API = "\n".join(page.read_text() for page in sorted((ROOT / "docs/api").glob("*.md")))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def sources(*parts: str) -> dict[str, Path]:
    """Return all modules of `parts`: their names, as they are imported, and their files."""
    found = {}
    for part in parts:
        for path in sorted((ROOT / part).rglob("*.py")):
            name = ".".join(("midstride", *path.relative_to(ROOT).with_suffix("").parts))
            found[name.removesuffix(".__init__")] = path
    return found


def modules(*parts: str) -> list[str]:
    """Return the names of all modules of `parts`."""
    return [*sources(*parts)]


def after_importing(names: list[str]) -> set[str]:
    """Return what a fresh interpreter has loaded once it has imported `names`; it has all extras, or stand-ins."""
    program = f"import sys\nfor name in {names!r}: __import__(name)\nprint(*sys.modules, sep='\\n')"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests/stand_in")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
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
EXTRAS = {"horovod": "midstride.engine.strategies.horovod", "torch_xla": "midstride.engine.strategies.xla"}


def test_the_engine_loads_no_orchestrator():
    engine = [name for name in modules("engine") if not name.endswith("__main__")]
    loaded = after_importing([name for name in engine if name not in EXTRAS.values()])
    assert not loaded & {"prefect", "fastapi", "airflow", *EXTRAS}


@pytest.mark.parametrize("library", [pytest.param("horovod", marks=needs_horovod), "torch_xla"])
def test_what_loads_an_extra_loads_nothing_else(library: str):
    assert after_importing([EXTRAS[library]]) & {"prefect", "fastapi", "airflow", *EXTRAS} == {library}


def test_a_job_is_read_without_torch():
    loaded = after_importing(["midstride.engine", "midstride.engine.config.job", "midstride.engine.strategies"])
    assert not loaded & {"torch", "prefect"}


def test_tasks_and_flows_load_no_torch():
    assert "torch" not in after_importing(modules("flows", "tasks"))


def test_every_public_name_of_the_engine_can_be_had():
    import midstride.engine

    for name in set(midstride.engine.__all__) - {"__version__"}:
        assert getattr(midstride.engine, name).__name__ == name
    assert set(midstride.engine.__all__) <= set(dir(midstride.engine)), "completion must offer them"


def test_the_version_is_the_installed_one():
    import midstride.engine

    assert midstride.engine.__version__ == importlib.metadata.version("midstride") == PROJECT["project"]["version"]


def test_the_reference_names_only_what_exists():
    for name, members in re.findall(r"^::: (\S+)(?:\n +options: \{members: \[(.*)\]\})?", API, re.MULTILINE):
        home, _, attribute = name.rpartition(".")
        found = pydoc.locate(name) or getattr(importlib.import_module(home), attribute)
        for member in filter(None, members.split(", ")):
            assert hasattr(found, member), f"docs/api lists {name}.{member}, which does not exist"


def test_the_constraints_pin_everything_that_is_named():
    groups = [*PROJECT["project"]["optional-dependencies"].values(), *PROJECT["dependency-groups"].values()]
    named = [*PROJECT["project"]["dependencies"], *(name for group in groups for name in group)]
    pinned = re.findall(r"^([a-z0-9-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert {re.split(r"[^A-Za-z0-9._-]", name)[0].lower().replace("_", "-") for name in named} <= set(pinned)


@pytest.mark.parametrize("name", [name for name, path in sources(*PARTS).items() if ">>>" in path.read_text()])
def test_doctests(name: str):
    failed, tried = doctest.testmod(importlib.import_module(name))
    assert tried > 0
    assert failed == 0


def test_an_index_of_cpu_builds_gives_the_pinned_torch(tmp_path: Path) -> None:
    """The hint in README.md: with another index beside PyPI, `make train` installs the build without CUDA."""
    [pinned] = re.findall(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    indexes = []
    for version in (pinned, f"{pinned}+cpu"):
        folder = tmp_path / version / "torch"
        folder.mkdir(parents=True)
        with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as wheel:
            info = f"torch-{version}.dist-info"
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
            wheel.writestr(
                f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            wheel.writestr(f"{info}/RECORD", "")
        (folder / "index.html").write_text(f'<a href="{quote(next(folder.glob("*.whl")).name)}">torch</a>')
        indexes.append(f"file://{tmp_path}/{quote(version)}")
    options = ["--dry-run", "--no-deps", "--ignore-installed", "-c", "constraints.txt"]
    command = [sys.executable, "-m", "pip", "install", *options]
    chosen = {"PIP_INDEX_URL": indexes[0], "PIP_EXTRA_INDEX_URL": indexes[1], "PIP_CONFIG_FILE": os.devnull}
    environment = {**os.environ, **chosen, "PIP_FIND_LINKS": "", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run([*command, "torch"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert f"Would install torch-{pinned}+cpu" in done.stdout, done.stdout + done.stderr
