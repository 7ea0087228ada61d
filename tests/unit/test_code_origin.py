"""Whose code a file is."""

import os

import pytest
import torch

from midstride.engine import code_origin
from midstride.engine.code_origin import is_python_file, is_user_file

FILES = {
    "/home/ann/project/model.py": True,
    "/home/ann/.local/lib/python3.12/site-packages/torch/utils/data/dataset.py": False,
    "/usr/local/lib/python3.12/dist-packages/torch/utils/data/dataset.py": False,
    "/opt/base/lib/python3.12/site-packages/torch/utils/data/dataset.py": False,
    torch.__file__: False,
    os.__file__: False,
    "<frozen os>": False,
    code_origin.__file__: False,
}


@pytest.mark.parametrize("path", FILES)
def test_what_lies_among_the_packages_of_any_python_is_a_library(path: str) -> None:
    assert is_user_file(path) == FILES[path]
    assert is_python_file(path) == (path in (os.__file__, "<frozen os>"))
