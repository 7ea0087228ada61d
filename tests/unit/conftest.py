"""What holds for every test of a part: the writers it opened are closed."""

from collections.abc import Iterator

import pytest
from support.snapshot_writers import OPEN


@pytest.fixture(autouse=True)
def _closed_writers(_nothing_left_behind: None) -> Iterator[None]:
    yield
    while OPEN:
        assert OPEN.pop().close(100)
