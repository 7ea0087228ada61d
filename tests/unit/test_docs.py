"""What is written about the project: links lead somewhere, commands parse, jobs are valid, programs run."""

import ast
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from support.fork_server import run_program
from support.pages import PAGES, ROOT, blocks, command_lines, command_spans

from midstride.engine.config.job import TrainingJob
from midstride.engine.config.yaml_file import parse_yaml
from midstride.engine.testing import run_ranks
from midstride.flows.cli import app


def pages_with(pattern: str) -> pytest.MarkDecorator:
    """Run a test for each page in which a line has `pattern`."""
    pages = [page for page in PAGES if re.search(pattern, page.read_text(), re.MULTILINE)]
    assert pages
    return pytest.mark.parametrize("page", pages, ids=lambda path: str(path.relative_to(ROOT)))


page = pages_with(r"^")

#: what a job needs, for blocks that show a part of one
PARTIAL: dict[str, Any] = {"name": "a", "module": "model:A", "data": "model:B", "trainer": {"max_epochs": 1}}


def write_files(page: Path) -> str:
    """Write the files that a page shows into this folder; return its program, made of the other blocks."""
    for language in ("python", "yaml"):
        for name, block in blocks(page, language):
            if name:  # readers have more patience
                Path(name).write_text(re.sub(r"(max_epochs(=|: ))\d+", r"\g<1>1", block))
    return "\n".join(block for name, block in blocks(page, "python") if not name)


def run_page(text: str) -> None:
    """Run a program that a page shows, as a reader does with `python page.py`."""
    page, log = Path("page.py"), Path("output.txt")
    page.write_text(text)
    assert run_program(page, log) == 0, log.read_text()


def run(*command: str) -> None:
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def run_here(folder: str, program: str) -> None:
    os.chdir(folder)
    runpy.run_path(program, run_name="__main__")


@page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not re.match(r"[a-z]+:|#", target):
            path = target.partition("#")[0]
            assert (page.parent / path).exists(), f"{page.name} links to {path}, which is not there"


@pages_with(r"(^|`)make ")
def test_make_targets_exist(page: Path) -> None:
    targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = {words[1] for words in [*command_lines(page), *command_spans(page, "make")] if words[0] == "make"}
    assert named - {"bench-..."} <= set(targets)


@pages_with(r"(^|`)midstride ")
def test_commands_parse(page: Path) -> None:
    for words in command_lines(page):
        if words[0] == "midstride":
            app.parse_args(words[1:], print_error=False, exit_on_error=False)
    for said in re.findall(r"`midstride ([a-z][^`]*)`", page.read_text()):
        assert app.parse_commands(said.split())[0], f"there is no command `midstride {said}`"


#: commands that need a server, a launcher or a champion -> the tests that run them
RUN_BY = {
    "train": "flows/test_cli.py",
    "nightly": "flows/test_nightly.py",
    "champion": "flows/test_nightly.py",
    "deploy": "flows/test_deployment.py",
    "serve": "flows/test_deployment.py",
    "setup-server": "flows/test_self_hosted.py",
    "join": "support/machines.py",
    "rank": "distributed/test_elastic.py",
    "compare": "unit/jobs/test_weights_of_runs.py",
    "fork": "unit/cli/test_forks.py",
    "replay": "unit/cli/test_forks.py",
    "verify": "unit/cli/test_forks.py",
    "diff": "unit/cli/test_forks.py",
    "test": "unit/jobs/test_weights_of_runs.py",
    "predict": "unit/jobs/test_weights_of_runs.py",
}
#: the other commands, in an order in which each finds what it needs
ORDER = ("init", "check", "fit", "runs", "report", "audit", "export", "snapshots")


def shown_commands() -> list[list[str]]:
    """Return every command line of midstride's on any page, once."""
    found = {tuple(words[1:]) for page in PAGES for words in command_lines(page) if words[0] == "midstride"}
    for page in PAGES:
        for _, block in blocks(page, "text"):
            found |= {tuple(shlex.split(line)[1:]) for line in block.splitlines() if line.startswith("midstride ")}
    return [[*command] for command in sorted(found)]


@pytest.mark.usefixtures("forked_worlds")
def test_commands_run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """What the pages show, on the project that `midstride init` writes, in short."""
    commands = [command for command in shown_commands() if command[0] not in RUN_BY]
    assert {command[0] for command in commands} <= set(ORDER)
    assert len(commands) > 15
    assert app(["init", "project"], result_action="return_value") == 0
    monkeypatch.chdir("project")
    job = re.sub(r"max_epochs: \d+", "max_epochs: 1", Path("job.yaml").read_text()).replace(
        "processes: 2", "processes: 1"
    )
    Path("job.yaml").write_text(f"{job}loggers: [{{tensorboard: {{log_dir: tracked}}}}]\n")
    Path("model.py").write_text(Path("model.py").read_text().replace("points: int = 3200", "points: int = 1200"))
    for command in sorted(commands, key=lambda command: ORDER.index(command[0])):
        words = ["job.yaml" if word.endswith("job.yaml") else word.replace("/tmp/", "") for word in command]
        for word in words:
            if re.match(r"runs/", word) and not Path(word).exists():
                shutil.copytree(next(Path("runs").iterdir()), word)
        assert app(words, result_action="return_value") == 0, (command, capfd.readouterr().err)


@pytest.mark.parametrize("command", RUN_BY)
def test_the_other_commands_run_elsewhere(command: str) -> None:
    assert re.search(rf"[\"' ]{command}[\"' ]", (ROOT / "tests" / RUN_BY[command]).read_text())
    assert command in app


@pages_with(r"^```yaml")
def test_jobs_are_valid(page: Path, tmp_path: Path) -> None:
    """A block whose keys are all a job's is a job, or a part of one."""
    path = tmp_path / "job.yaml"
    for _, block in blocks(page, "yaml"):
        document = parse_yaml(block)
        is_whole = not {"module", "script"}.isdisjoint(document)
        if is_whole or set(document) <= set(TrainingJob.model_fields):
            path.write_text(block if is_whole else json.dumps(PARTIAL | document))
            TrainingJob.load(path)


@pytest.mark.parametrize("name", ["lanes", "sharded"])
@pytest.mark.usefixtures("forked_worlds")
def test_a_part_of_a_job_trains(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That with which a page opens, in the job that `midstride init` writes."""
    assert app(["init", "project"], result_action="return_value") == 0
    monkeypatch.chdir("project")
    _, part = next(blocks(ROOT / f"docs/{name}.md", "yaml"))
    job = parse_yaml(Path("job.yaml").read_text()) | parse_yaml(part)
    job["world"] |= {"processes": 2, "accelerator": "cpu"}
    job["data_args"] = {"points": 1200} | job.get("data_args", {})
    job["trainer"] = {"max_epochs": 1}
    Path("job.yaml").write_text(json.dumps(job))
    assert app(["fit", "job.yaml", "--run", name], result_action="return_value") == 0


@pages_with(r"^```python$")
def test_python_blocks_run(page: Path) -> None:
    """The blocks of a page are one program, which a reader may paste into a file; those with a title are files."""
    program = write_files(page)
    if "import horovod" in program:
        pytest.importorskip("horovod")
    run_page(program)


#: kind of a page's first code block -> the test that tries it
TRIED = {
    "python": "test_python_blocks_run, test_a_newcomer_gets_started",
    "yaml": "test_jobs_are_valid",
    "sh": "test_commands_run, test_the_other_commands_run_elsewhere, test_make_targets_exist",
}
#: pages that open otherwise: a text or a drawing, files of the checkout, a command that only others have
OPENED_OTHERWISE = {"architecture", "glossary", "comparison", "snapshot-format", "airflow", "CHANGELOG"}
#: lines before the first example: a heading, some sentences and maybe a table or a picture
LINES_BEFORE = 24


@page
def test_a_page_opens_with_an_example_that_is_tried(page: Path) -> None:
    if page.stem in OPENED_OTHERWISE or page.parent.name == "api":
        return
    before, fence, rest = page.read_text().partition("\n```")
    assert fence, "no example"
    assert before.count("\n") < LINES_BEFORE, "the example comes late"
    kind = re.match(r"\w*", rest)
    assert kind is not None
    assert kind[0] in TRIED, f"no test tries {kind[0]!r}"


@pages_with(r"^```python")
def test_python_blocks_name_what_they_use(page: Path) -> None:
    """Also where they only define something."""
    Path("page.py").write_text(write_files(page))
    run("-m", "ruff", "check", "--quiet", "--isolated", "--select=F821", ".")


#: what the page tells a newcomer to do
NEWCOMER = """
import runpy
runpy.run_path("train.py", run_name="__main__")
from midstride.engine.jobs.check import job_errors
from midstride.engine.config.job import TrainingJob
from midstride.engine.config.yaml_file import parse_yaml
assert not (faults := job_errors(TrainingJob.load("job.yaml"))), faults
runpy.run_path("test_model.py")["test_resumes_exactly"]()
"""


def test_a_newcomer_gets_started() -> None:
    write_files(ROOT / "docs/get-started.md")
    run_page(NEWCOMER)


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_plain_script_of_the_docs_has_the_same_bits(ranks: int) -> None:
    write_files(ROOT / "docs/exact-resume.md")
    assert run_ranks(run_here, str(Path.cwd()), "by_hand.py", processes=ranks) == [0] * ranks
    assert Path("runs/by-hand/last").exists()


def test_the_site_is_whole(tmp_path: Path) -> None:
    """Built as `make docs` does, where every warning is an error: of a page, a link, an anchor, a docstring."""
    run("-m", "mkdocs", "build", "--strict", "-f", str(ROOT / "mkdocs.yml"), "-d", str(tmp_path / "site"))
    keys = (tmp_path / "site/job/index.html").read_text()
    for field in TrainingJob.model_fields:
        assert f"<code>{field}</code>" in keys
    commands = (tmp_path / "site/command-line/index.html").read_text()
    for command in app:
        assert command.startswith("-") or f"midstride {command}" in commands


def written_by_code(name: str) -> str:
    """Return a reference as the site has it."""
    return str(runpy.run_path(str(ROOT / "docs/hooks/reference.py"))[name]())


def test_the_reference_of_a_job_says_which_keys_a_file_needs() -> None:
    needed = {"name", "module", "data", "trainer", "metric", "path", "skip"}
    found = {
        key
        for key, _, default in re.findall(r"^\| `(\w+)` \| (.*) \| (.*) \| .* \|$", written_by_code("job"), re.M)
        if default == "**needed**"
    }
    assert found == needed


def test_a_reader_may_type_the_usage_of_a_command() -> None:
    usages = re.findall(r"^```text\n(.*)$", written_by_code("commands"), re.MULTILINE)
    assert len(usages) > 15
    assert [usage for usage in usages if not usage.startswith("midstride ") or " -m " in usage] == []


def test_every_command_says_what_it_does() -> None:
    for name in app:
        if not name.startswith("-"):
            assert app[name].help, name


#: words of a tale, where the reader of a reference needs a subject: which process, rank, user or default
BANNED = re.compile(
    r"\b(whoever|nobody|somebody|befalls?|befell|reigns?|reigning|crown(s|ed)?|in words|its last words?)\b"
    r"|\(by itself\)",
    re.IGNORECASE,
)
SUFFIXES = {".py", ".md", ".yaml", ".json", ".sh", ".toml"}
WRITTEN = [
    path
    for folder in ("engine", "tasks", "flows", "docs", "deploy")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in SUFFIXES
]


def test_the_words_are_plain() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in (*WRITTEN, *sorted(ROOT.glob("*.md")))
        if path.name != "CHANGELOG.md"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if BANNED.search(line)
    ]
    assert len(WRITTEN) > 200
    assert found == []


ARCHITECTURE = (ROOT / "docs/architecture.md").read_text()
FILES = [
    path.relative_to(ROOT).as_posix() for part in ("engine", "tasks", "flows") for path in (ROOT / part).rglob("*.py")
]
CODE = {word for file in FILES for word in re.findall(r"\w+", (ROOT / file).read_text())}


def test_the_drawings_name_files_that_are_there() -> None:
    named = set(re.findall(r"[\w/]+\.py\b", ARCHITECTURE))
    assert len(named) >= 9
    assert [name for name in sorted(named) if not any(f"/{file}".endswith(f"/{name}") for file in FILES)] == []


def test_the_drawings_name_every_package_of_the_engine() -> None:
    packages = {f"engine/{path.parent.name}" for path in (ROOT / "engine").glob("*/__init__.py")}
    named = set(re.findall(r"\bengine/\w+\b(?!\.py)", ARCHITECTURE))
    assert named == packages


def test_the_floors_are_drawn_as_the_contract_holds_them() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["name"].startswith("the floors"))
    held = [{name for name in layer.split(" | ") if (ROOT / "engine" / name).is_dir()} for layer in layers]
    floors = ARCHITECTURE.partition("## The floors")[2].partition("\n## ")[0]
    drawn = [set(re.findall(r"engine/(\w+)\b(?!\.py)", line)) for line in floors.splitlines()]
    assert [floor for floor in drawn if floor] == [floor for floor in held if floor]


def test_the_page_on_the_code_names_what_is_in_it() -> None:
    quoted = [*re.findall(r"`([^`\n]+)`", ARCHITECTURE), *re.findall(r"\b[A-Z][a-z]+(?:[A-Z][a-z]+)+\b", ARCHITECTURE)]
    words = {
        word for name in quoted for word in re.findall(r"[A-Za-z_]\w+", name.replace(".py", "")) if "://" not in name
    }
    folders = {part for file in FILES for part in re.findall(r"\w+", file)}
    assert [word for word in sorted(words) if word not in CODE | folders] == []


PACKAGES = [path for part in ("engine", "tasks", "flows") for path in sorted((ROOT / part).rglob("__init__.py"))]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.parent.name)
def test_a_package_draws_each_of_its_files(package: Path) -> None:
    drawn = re.findall(r"^ *(\w+)  ", ast.get_docstring(ast.parse(package.read_text())) or "", re.MULTILINE)
    assert {path.stem for path in package.parent.glob("*.py")} - {"__init__", "__main__", *drawn} == set()
