from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cdc_core.tables import layout as tables
from pipelines.delta import tables as delta
from pipelines.gold import run as gold
from pipelines.silver import run as silver
from pipelines.spark import session as sparks
from tests import bronze_rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cdc_core.settings import parse as settings

EVERYTHING = {
    "_id": {"$oid": "65f0c0ffee0123456789abcd"},
    "text": "grüße 🙂",
    "int": 7,
    "long": {"$numberLong": "5000000000"},
    "double": 1.5,
    "decimal": {"$numberDecimal": "12.50"},
    "yes": True,
    "at": {"$date": {"$numberLong": "1700000000123"}},
    "bytes": {"$binary": {"base64": "AQI=", "subType": "00"}},
    "nested": {"a": {"b": 1}, "list": [{"c": "x"}, {"c": "y"}]},
    "pattern": {"$regularExpression": {"pattern": "^a", "options": "i"}},
}

Row = dict[str, Any]


@pytest.fixture(scope="module")
def published(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> tables.TableRef:
    """A gold table that saw a first load, a new column, a widening, a rescue, a delete and an update."""
    chosen = _settings(tmp_path_factory.mktemp("gold"))
    layout = delta.layout(chosen.lakehouse)
    log = bronze_rows.Log(spark, layout.bronze(chosen.name))
    batches: tuple[list[Row], ...] = (
        [
            {"op": "c", "key": "a", "at": 10, "after": EVERYTHING},
            {"op": "c", "key": "b", "at": 11, "after": {"_id": "b", "int": 1}},
            {"op": "c", "key": "c", "at": 12, "after": {"_id": "c", "int": 2}},
        ],
        [{"op": "u", "key": "a", "at": 20, "after": {**EVERYTHING, "new": "column", "int": {"$numberLong": "8"}}}],
        [{"op": "d", "key": "b", "at": 30}, {"op": "u", "key": "c", "at": 31, "after": {"_id": "c", "text": 5}}],
    )
    for batch in batches:
        log.append({"things": batch})
        silver.run(spark, chosen, sessions=sparks.sessions(spark))
        gold.run(spark, chosen, sessions=sparks.sessions(spark))
    return layout.gold(bronze_rows.DB, "things")


def _settings(root: Path) -> settings.Settings:
    from cdc_core.settings import parse as settings

    return settings.parse(
        {
            "name": "hand",
            "lakehouse": {"root": str(root)},
            "source": {"mongodb.connection.string": "${env:NOWHERE}"},
        }
    )


def test_plain_features(spark: SparkSession, published: tables.TableRef) -> None:
    """A gold table asks of its readers nothing that is newer than Delta's first protocol."""
    detail = spark.sql(f"DESCRIBE DETAIL {published}").first()
    assert detail is not None
    assert (detail.minReaderVersion, set(detail.tableFeatures) - {"appendOnly", "invariants"}) == (1, set())
    schema = spark.table(str(published)).schema
    assert schema.names[-2:] == ["__rescued", "__key"]
    assert "delta.typeChanges" not in schema.json()


WANTED = [
    {
        "_id": "65f0c0ffee0123456789abcd",
        "text": "grüße 🙂",
        "int": 8,
        "long": 5000000000,
        "double": 1.5,
        "decimal": "12.50",
        "yes": True,
        "at": datetime.datetime(2023, 11, 14, 22, 13, 20, 123000, tzinfo=datetime.timezone.utc),
        "bytes": b"\x01\x02",
        "nested": {"a": {"b": 1}, "list": [{"c": "x"}, {"c": "y"}]},
        "pattern": {"regex": "^a", "options": "i"},
        "new": "column",
    },
    {"_id": "c", "__rescued": {"text": "5"}},
]


def test_delta_rs_reads_it(published: tables.TableRef) -> None:
    """delta-rs reads every value of a gold table."""
    import deltalake

    rows = deltalake.DeltaTable(published.path).to_pyarrow_table().to_pylist()
    assert _sorted(rows) == WANTED


def test_polars_reads_it(published: tables.TableRef) -> None:
    """Polars reads every value of a gold table."""
    import polars

    assert published.path is not None
    rows = polars.read_delta(published.path).to_dicts()
    assert _sorted(rows) == WANTED


def test_duckdb_reads_it(published: tables.TableRef) -> None:
    """DuckDB reads every value of a gold table, by way of delta-rs."""
    import deltalake
    import duckdb

    things = duckdb.from_arrow(deltalake.DeltaTable(published.path).to_pyarrow_table())
    found = things.query("things", "SELECT _id, long, nested.a.b, nested.list[2].c FROM things ORDER BY __key").fetchall()
    assert found == [("65f0c0ffee0123456789abcd", 5000000000, 1, "y"), ("c", None, None, None)]


def _sorted(rows: list[Row]) -> list[Row]:
    return [_plain(row) for row in sorted(rows, key=lambda row: str(row["_id"]))]


def _mapping(value: Any) -> dict[str, str]:
    """A map as a reader gives it: as a mapping, or as a list of pairs or of structs."""
    if isinstance(value, dict):
        return value
    return dict(tuple(item.values()) if isinstance(item, dict) else item for item in value)


def _plain(row: Row) -> Row:
    found = {name: value for name, value in row.items() if value is not None and name != "__key"}
    if "__rescued" in found:
        found["__rescued"] = _mapping(found["__rescued"])
    return found
