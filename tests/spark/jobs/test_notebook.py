"""The notebooks over hand-made gold tables; the journey of the demo runs them over its own tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cdc_core.tables import layout as tables
from pipelines.delta import ops_tables
from pipelines.verify import run as verify
from tests.harness import notebooks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

GOLD = {
    "customers": "'c1' AS _id, 'Lyon' AS address_city",
    "orders": (
        "1L AS _id, 'new' AS status, 7.50BD AS total, 2 AS pieces, 'c1' AS customer, 'c' AS __op, 5000L AS __source_ts_ms, "
        "array(named_struct('sku', 'p1', 'quantity', 2, 'price', 3.75BD)) AS lines"
    ),
    "products": "'p1' AS _id, 'oak lamp' AS title, map('weight', '\"ask us\"') AS __rescued",
    "lost_and_found": "'the till' AS _id",
}
"""One row of each of the shop's gold tables."""


@pytest.fixture
def lake(spark: SparkSession, lakehouse: Path) -> Path:
    """A lakehouse with the shop's gold tables."""
    layout = tables.Layout(root=str(lakehouse))
    for collection, row in GOLD.items():
        spark.sql(f"SELECT {row}, '1' AS __key").write.format("delta").save(layout.gold("shop", collection).path)
    differences = '[{"key": "17", "kind": "different", "paths": [{"path": "total", "what": "another value"}]}]'
    counts = {"documents": 9, "equal": 8, "missing": 0, "extra": 0, "different": 1, "incomplete": 4321, "repaired": 0}
    verified = {"collection": "shop.orders", "layer": "gold", "at_ms": 5000, "differences": differences, **counts}
    ops_tables.note(spark, layout.ops("verifications"), [verified], verify.SCHEMA)
    return lakehouse


SHOWN = {
    "analyst_tour.ipynb": (5, ("ask us", "oak lamp", "Lyon", "7.50")),
    "quality.ipynb": (3, ("shop.orders", "4321", "total: another value", "weight", "no expectations were checked yet")),
}
"""The least number of tables that each notebook shows, and some of their contents."""


@pytest.mark.parametrize("path", notebooks.PATHS, ids=lambda path: path.name)
def test_the_notebook_runs_from_its_first_cell_to_its_last(
    path: Path, lake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In its own folder, where Jupyter runs it, every code cell prints rows; the file contains no output of an earlier run."""
    monkeypatch.delenv("MEDALLION_LAKEHOUSE", raising=False)
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "lakehouse").symlink_to(lake)
    monkeypatch.chdir(tmp_path / "notebooks")
    assert all(cell["outputs"] == [] for cell in notebooks.run(path))
    shown = capsys.readouterr().out
    count, texts = SHOWN[path.name]
    assert shown.count("+--") >= count
    assert all(found in shown for found in texts)
