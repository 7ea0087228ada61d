"""Commands of other programs on the pages: each is parsed by the program itself, or held to the files that it reads."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from ruamel.yaml import YAML
from support.pages import PAGES, ROOT, blocks, command_lines, command_spans
from torch.distributed.run import get_args_parser

from midstride.flows.cli import app

Shown = Sequence[tuple[Path, list[str]]]

#: the folder of a checkout on the pages
CHECKOUT = "path/to/midstride/"
#: programs whose commands also stand in sentences
IN_SENTENCES = ("docker", "kubectl", "pip", "prefect", "python", "sky", "srun", "torchrun")


def shown() -> dict[str, list[tuple[Path, list[str]]]]:
    """Return every command on the pages, with its page, by its program."""
    found: dict[str, list[tuple[Path, list[str]]]] = {}
    for page in PAGES:
        spans = [words for program in IN_SENTENCES for words in command_spans(page, program)]
        for words in [*command_lines(page), *spans]:
            words = words[1:] if re.match("[A-Z_]+=", words[0]) else words
            words = words[:-1] if words[-1] == "&" else words
            found.setdefault(Path(words[0]).name, []).append((page, words))
    return found


def parse_midstride(words: Sequence[str]) -> None:
    """Have our own command line parse what comes after the word midstride."""
    app.parse_args(words[words.index("midstride") + 1 :], print_error=False, exit_on_error=False)


def is_there(page: Path, name: str) -> bool:
    """Return whether a reader has the file: in the project, from the page, or by the name of one of their own."""
    titles = [title for language in ("python", "yaml", "bash") for title, _ in blocks(page, language)]
    return (ROOT / name).exists() or name in titles or name in ("script.py", "train.py")


def check_cd(commands: Shown) -> None:
    """Into a folder that an earlier command has made."""
    for page, (_, folder) in commands:
        assert f"midstride init {folder}\ncd {folder}\n" in page.read_text()


def check_cp(commands: Shown) -> None:
    for _, (_, source, target) in commands:
        assert (ROOT / source).exists()
        assert (ROOT / target).parent.is_dir()


def check_docker(commands: Shown) -> None:
    """There is no Compose on PyPI or in Debian that needs no engine: services and options are those of the table."""
    for _, words in commands:
        docker, compose, f, file, verb, *rest = words
        assert (docker, compose, f) == ("docker", "compose", "-f")
        services = YAML(typ="safe", pure=True).load(ROOT / file)["services"]
        if verb == "up":
            assert set(rest) <= {"--build", "--detach"}
        else:
            assert verb == "exec"
            assert rest[0] in services
            parse_midstride(rest)


def check_export(commands: Shown) -> None:
    prefects = [words[1].partition("=")[0] for _, words in commands]
    parse_by("import prefect.settings\nfor name in given: assert hasattr(prefect.settings, name), name", prefects)


def check_horovodrun(commands: Shown) -> None:
    launch = pytest.importorskip("horovod.runner.launch", reason="needs Horovod: make horovod")
    for page, words in commands:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", words)
            parsed = launch.parse_args()
        assert parsed.command[0] == "python"
        assert is_there(page, parsed.command[1])


def check_kubectl(commands: Shown) -> None:
    """What lies under deploy/ is put together by kubectl itself; options are parsed before it tells its help."""
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl; its files are held to the schemas of Kubernetes by test_deploy.py")
    for _, words in commands:
        subprocess.run([*words, "--help"], check=True, capture_output=True)
        for folder in (word for word in words if (ROOT / word).is_dir()):
            subprocess.run(["kubectl", "kustomize", ROOT / folder], check=True, capture_output=True)
        for service in (word.removeprefix("service/") for word in words if word.startswith("service/")):
            assert f"name: {service}" in (ROOT / "deploy/kubernetes/server.yaml").read_text()


def check_pip(commands: Shown) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for _, (_, install, *words) in commands:
        assert install == "install"
        if words[0] == "-c":
            assert words[1].endswith("constraints.txt")
            words = []  # the folder of the project comes after it
        for folder in (word.removeprefix(CHECKOUT) for word in words if word.startswith(CHECKOUT)):
            assert (ROOT / folder / "pyproject.toml").exists()
        for requirement in (Requirement(word) for word in words if not word.startswith(CHECKOUT)):
            assert requirement.name != "midstride" or requirement.extras <= set(extras)


def check_prefect(commands: Shown) -> None:
    """By Prefect's own command line; what needs no second machine is also run, in flows/test_prefect_commands.py."""
    parse_by(
        "from prefect.cli import _app\n"
        "for words in given: _app._app.parse_args(words, print_error=False, exit_on_error=False)",
        [words[1:] for _, words in commands],
    )


def check_python(commands: Shown) -> None:
    for page, words in commands:
        assert words[1] == "-m" or is_there(page, words[1]), words


def check_sky(commands: Shown) -> None:
    """SkyPilot brings half a cloud with it and is not installed: test_recipes.py reads the file that it is given."""
    for page, words in commands:
        assert words[:3] == ["sky", "jobs", "launch"]
        assert is_there(page, words[3])


def check_srun(commands: Shown) -> None:
    """A real srun starts a script so in distributed/test_slurm.py."""
    for page, words in commands:
        assert all(re.fullmatch(r"--ntasks=\d+", option) for option in words[1 : words.index("python")])
        assert is_there(page, words[-1])


def check_torchrun(commands: Shown) -> None:
    for page, words in commands:
        parsed = get_args_parser().parse_args(words[1:])
        if parsed.no_python:
            parse_midstride(words)
        else:
            assert is_there(page, parsed.training_script)


def parse_by(program: str, given: Any) -> None:
    """Run `program` in a process of its own with `given`: importing Prefect starts threads, and takes a second."""
    program = f"import json, sys\ngiven = json.loads(sys.argv[1])\n{program}"
    done = subprocess.run([sys.executable, "-c", program, json.dumps(given)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


#: a program -> what its commands are checked by
CHECKS: dict[str, Callable[[Shown], None]] = {
    "cd": check_cd,
    "cp": check_cp,
    "docker": check_docker,
    "export": check_export,
    "horovodrun": check_horovodrun,
    "kubectl": check_kubectl,
    "pip": check_pip,
    "prefect": check_prefect,
    "python": check_python,
    "python3": check_python,
    "sky": check_sky,
    "srun": check_srun,
    "torchrun": check_torchrun,
}
#: checked by test_docs.py
ELSEWHERE = {"make", "midstride"}


def test_every_command_is_of_a_program_with_a_check() -> None:
    assert set(shown()) == {*CHECKS, *ELSEWHERE}


@pytest.mark.parametrize("program", CHECKS)
def test_commands_are_what_their_program_takes(program: str) -> None:
    CHECKS[program](shown()[program])
