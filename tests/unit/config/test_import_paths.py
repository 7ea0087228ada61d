"""What a job names by import path is found, or what there is instead is said."""

from pathlib import Path

import pytest

from midstride.engine.config.import_paths import call_with, load_attribute
from midstride.engine.errors import JobError, UserCodeError


def make_module(folder: Path, text: str, name: str) -> str:
    (folder / f"{name}.py").write_text(text)
    return name


def test_a_missing_module_names_what_is_there(tmp_path: Path) -> None:
    make_module(tmp_path, "", "classifiers")
    with pytest.raises(
        JobError, match=r"there is no module 'classifier', did you mean 'classifiers'\?; .* has classifiers"
    ):
        load_attribute("classifier:A", tmp_path, "module")


def test_a_missing_attribute_names_what_is_there(tmp_path: Path) -> None:
    make_module(tmp_path, "class Classifier: ...\nclass Other: ...", "some_models")
    with pytest.raises(JobError, match=r"has no 'Clasifier', did you mean 'Classifier'\?; it has Classifier, Other"):
        load_attribute("some_models:Clasifier", tmp_path, "module")


@pytest.mark.parametrize("text", ["import not_there_at_all", "1 / 0", "def f(:"])
def test_a_failing_import_shows_its_traceback_first(tmp_path: Path, text: str) -> None:
    name = make_module(tmp_path, text, f"broken_{abs(hash(text))}")
    with pytest.raises(UserCodeError) as caught:
        load_attribute(f"{name}:A", tmp_path, "module")
    message = str(caught.value)
    assert f"{name}.py" in message
    assert "imports.py" not in message
    assert message.endswith(f"raised in import of {name}")


def test_an_import_that_exits(tmp_path: Path) -> None:
    name = make_module(tmp_path, "import argparse\nargparse.ArgumentParser().parse_args(['--x'])", "with_options")
    with pytest.raises(JobError, match=f'importing {name} ended the program with 2. .* if __name__ == "__main__":'):
        load_attribute(f"{name}:A", tmp_path, "module")


def test_two_jobs_may_both_have_a_model(tmp_path: Path) -> None:
    for one in ("a", "b"):
        (tmp_path / one).mkdir()
        make_module(tmp_path / one, f"class Model: name = {one!r}", "twice_there")
    names = [load_attribute("twice_there:Model", tmp_path / one, "module").name for one in ("a", "b", "a")]
    assert names == ["a", "b", "a"]


def test_wrong_arguments_are_faults_of_the_job() -> None:
    def build(hidden: int, *, depth: int = 1) -> None: ...

    with pytest.raises(JobError) as caught:
        call_with(build, {"hiden": 3}, "model:build", "module_args")
    assert str(caught.value).splitlines() == [
        "module_args.hiden: model:build takes no 'hiden', did you mean 'hidden'?; it takes hidden, depth",
        "module_args.hidden: is missing; model:build needs it",
    ]


def test_what_cannot_be_called_is_a_fault_of_the_job() -> None:
    with pytest.raises(JobError, match="model:torch is a module; a class or a function is needed"):
        call_with(pytest, {"hidden": 3}, "model:torch", "module_args")
