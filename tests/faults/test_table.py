"""Every fault of the table, on every store: the run ends with the bits of the run that nothing befell."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from faults.document import PAGE, text
from faults.scene import Scene
from faults.strikes import unmount
from faults.table import DONE, ROWS, Cell, Row
from laws.lives import Setting

CELLS = [(row, cell) for row in ROWS for cell in row.cells]


def name_of(value: object) -> str:
    if isinstance(value, Row):
        return value.fault.partition(" (")[0].replace(" ", "_")
    assert isinstance(value, Cell)
    return f"{value.name}-{value.store}".replace(" ", "_")


@pytest.fixture
def scene(row: Row, cell: Cell, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Scene]:
    """A run of two ranks on the cell's store; on S3 it takes few snapshots, since each takes a while."""
    if cell.store == "local":
        yield Scene(tmp_path, str(tmp_path / "store" / "run"), Setting(ranks=2))
        unmount(tmp_path / "store")
    else:
        server = request.getfixturevalue("own_s3" if cell.own else "s3")
        with server.reached(FSSPEC_S3=json.dumps({"config_kwargs": {"read_timeout": 2}})):
            url = f"{server.bucket()}/runs/run"
            yield Scene(tmp_path, url, Setting(ranks=2, options={"snapshots": {"every_steps": 4}}), server)


@pytest.mark.parametrize(("row", "cell"), CELLS, ids=name_of)
def test_a_fault_changes_no_bit(row: Row, cell: Cell, scene: Scene, undisturbed: Callable[[Setting], Path]) -> None:
    with cell.strike(scene):
        codes = scene.live()
        assert row.code in codes, f"{codes}\n{scene.said}"

    if row.code != DONE:
        assert scene.live() == [0, 0], scene.said

    scene.assert_alike(undisturbed(scene.setting))
    if row.says:
        assert any(row.is_said(line, scene.url) for line in scene.said.splitlines()), scene.said


def test_the_page_is_what_the_table_says() -> None:
    assert PAGE.read_text() == text(), "write it anew: cd tests && python -m faults.document"
