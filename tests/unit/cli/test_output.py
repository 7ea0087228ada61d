"""What commands print for programs can be read by all of them."""

import json
import math

import pytest

from midstride.engine.cli.output import print_json


def test_json_has_no_number_that_is_not_finite(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"best": ("val/loss", math.nan), "at": [math.inf, 0.1, 1e-12, 10**20]})

    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is no JSON")

    printed = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert printed == {"best": ["val/loss", None], "at": [None, 0.1, 1e-12, 10**20]}
