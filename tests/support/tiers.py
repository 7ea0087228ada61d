"""What only the full tier runs."""

import pytest

__all__ = ["everything"]

everything = pytest.mark.skipif("config.getoption('--laws') != 'all'", reason="one of the rows that --laws=all runs")
