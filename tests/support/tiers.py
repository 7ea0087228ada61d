"""What only the full tier runs."""

import pytest

everything = pytest.mark.skipif("config.getoption('--laws') != 'all'", reason="one of the rows that --laws=all runs")
