"""What a package index gets: an sdist and a wheel with every file, whose page leads somewhere."""

import email
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.message import Message
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("engine", "flows", "tasks")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BUILD = "from setuptools import build_meta as b; b.build_sdist('dist'); b.build_wheel('dist')"


def build(folder: Path) -> tuple[Path, Path]:
    """Build the sdist and the wheel of the sources in `folder`."""
    done = subprocess.run([sys.executable, "-c", BUILD], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [sdist], [wheel] = (folder / "dist").glob("*.tar.gz"), (folder / "dist").glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Return the wheel that is made of the sdist, as pip makes one where there is none."""
    sources = tmp_path_factory.mktemp("sources")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    for part in PARTS:
        shutil.copytree(ROOT / part, sources / part, ignore=shutil.ignore_patterns("__pycache__"))
    sdist, _ = build(sources)
    unpacked = tmp_path_factory.mktemp("unpacked")
    subprocess.run(["tar", "-xf", sdist, "-C", unpacked], check=True)
    [folder] = unpacked.iterdir()
    return zipfile.ZipFile(build(folder)[1])


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    [name] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return email.message_from_bytes(wheel.read(name))


def test_a_wheel_made_of_the_sdist_has_every_file(wheel: zipfile.ZipFile) -> None:
    sources = {
        f"midstride/{path.relative_to(ROOT).as_posix()}"
        for part in PARTS
        for path in (ROOT / part).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    kinds = [path for path in (ROOT / "engine/cli/template").iterdir() if path.is_symlink()]
    files = [path for kind in kinds for name in ("*.py", "job.yaml") for path in kind.glob(name)]
    files = [path for path in files if path.name in ("model.py", "train.py", "job.yaml")]
    examples = {f"midstride/{path.relative_to(ROOT).as_posix()}" for path in files}
    assert len(kinds) > 3
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == sources | examples


def test_the_page_of_the_index_has_no_relative_link(metadata: Message) -> None:
    page, base = str(metadata.get_payload()), f"{PROJECT['urls']['Repository']}/"
    assert metadata["Description-Content-Type"] == "text/markdown"
    targets = re.findall(r"\]\(([^)\s]+)\)", page)
    ours = [target.removeprefix(base) for target in targets if target.startswith(base)]
    assert len(ours) == len(re.findall(r"\]\((?!https?:|#)", (ROOT / "README.md").read_text())) > 20
    assert [target for target in targets if not re.match(r"https://|#", target)] == []
    for kind, tag, path in (target.split("/", 2) for target in ours):
        assert (ROOT / path.partition("#")[0]).exists(), path
        assert (kind, tag) == ("raw" if path.endswith(".png") else "blob", f"v{PROJECT['version']}")


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("[a](docs/a.md#b)", "[a](u/blob/v1/docs/a.md#b)"),
        ("[![a](b.png)](docs/c)", "[![a](u/raw/v1/b.png)](u/blob/v1/docs/c)"),
        ("[a](https://b) [c](#d) [e](mailto:f)", "[a](https://b) [c](#d) [e](mailto:f)"),
    ],
)
def test_links_are_made_absolute(text: str, made: str) -> None:
    assert runpy.run_path(str(ROOT / "setup.py"))["with_absolute_links"](text, "u", "v1") == made


def test_the_index_knows_who_where_and_for_what(metadata: Message) -> None:
    assert (metadata["Author"], metadata["License-Expression"]) == ("midstride developers", "Apache-2.0")
    urls = dict(line.split(", ") for line in metadata.get_all("Project-URL"))
    assert set(urls) == {"Repository", "Documentation", "Changelog", "Issues"}
    assert all(url.startswith(urls["Repository"]) for url in urls.values())
    versions = {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)}
    assert versions <= set(metadata.get_all("Classifier"))


def test_prefect_finds_the_collection(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """It is loaded by every server and worker: without torch."""
    wheel.extractall(tmp_path)
    program = """
import sys
from prefect.plugins import load_prefect_collections
print(load_prefect_collections()["midstride"].__name__, "torch" in sys.modules)
"""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["midstride.flows", "False"], done.stderr
