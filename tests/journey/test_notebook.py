"""The analysts' notebook over gold tables of the demo's shop."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pipelines import capture, demo, embedded_mongodb, gold, mongodb, settings_file, shop, silver
from pipelines import spark as sparks
from tests.conftest import StartServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
STEPS = 60


@pytest.fixture
def folder(spark: SparkSession, start_mongodb: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a shop that was stocked, and open for a few steps; its tables are up to date."""
    server = start_mongodb(embedded_mongodb.Options())
    root = json.dumps(str(tmp_path / "lakehouse"))
    (tmp_path / "shop.yml").write_text(demo.SETTINGS.format(directory=tmp_path, root=root), encoding="utf-8")
    monkeypatch.setenv("MONGODB_URI", server.uri)
    settings = settings_file.load(tmp_path / "shop.yml")
    closed = threading.Event()
    played: list[str] = []

    def count(step: str) -> None:
        played.append(step)
        if len(played) == STEPS:
            closed.set()

    with contextlib.closing(mongodb.client(server.uri)) as client:
        shop.stock(client)
        shop.open_for_business(client, stop=closed, pause=0, each=count)
    capture.run(spark, settings, once=True)
    for layer in (silver, gold):
        layer.run(spark, settings, sessions=sparks.sessions(spark))
    yield tmp_path


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.name)
def test_the_notebook_runs_from_its_first_cell_to_its_last(
    path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every code cell runs in order, and prints rows; the file holds no output of an earlier run."""
    monkeypatch.setenv("MEDALLION_LAKEHOUSE", str(folder / "lakehouse"))
    cells = [cell for cell in json.loads(path.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] for cell in cells)
    namespace: dict[str, Any] = {}
    for number, cell in enumerate(cells):
        exec(compile("".join(cell["source"]), f"{path.name}:{number}", "exec"), namespace)  # noqa: S102
    shown = capsys.readouterr().out
    assert shown.count("+--") >= 5 and "ask us" in shown
