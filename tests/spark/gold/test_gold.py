from __future__ import annotations

import datetime
import random
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from cdc_core.gold import cut
from cdc_core.tables import layout as tables
from pipelines.delta import maintenance, query_execution, table_history
from pipelines.delta import tables as delta
from pipelines.delta.writer import Writer
from pipelines.gold import run as gold
from pipelines.operations import cut as published_cut
from pipelines.silver import run as silver
from tests.harness import bronze_rows, layers, sessions

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
    """A gold table after a first load, a new column, a widened column, a rescued value, a delete and an update."""
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
        silver.run(spark, chosen, sessions=sessions.kept(spark))
        gold.run(spark, chosen, sessions=sessions.kept(spark))
    return layout.gold(bronze_rows.DB, "things")


def _settings(root: Path, *, vectors: bool | None = None, **silver: Any) -> settings.Settings:
    from cdc_core.settings import parse as settings

    return settings.parse(
        {
            "name": "hand",
            "lakehouse": {"root": str(root)},
            "source": {"mongodb.connection.string": "${env:NOWHERE}"},
            "silver": silver,
            "gold": {} if vectors is None else {"delta.enableDeletionVectors": vectors},
        }
    )


def test_plain_features(spark: SparkSession, published: tables.TableRef) -> None:
    """A gold table needs no reader feature beyond Delta's first protocol, except deletion vectors."""
    assert _asked(spark, published) == {"deletionVectors"}
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
        "at": datetime.datetime(2023, 11, 14, 22, 13, 20, 123000, tzinfo=datetime.UTC),
        "bytes": b"\x01\x02",
        "nested": {"a": {"b": 1}, "list": [{"c": "x"}, {"c": "y"}]},
        "pattern": {"regex": "^a", "options": "i"},
        "new": "column",
    },
    {"_id": "c", "__rescued": {"text": "5"}},
]


def test_delta_rs_reads_it(published: tables.TableRef) -> None:
    """delta-rs reads every value of a gold table."""
    assert _sorted(_read_by_delta_rs(published).to_pylist()) == WANTED


def test_polars_reads_it(published: tables.TableRef) -> None:
    """Polars reads every value of a gold table."""
    import polars

    assert published.path is not None
    rows = polars.read_delta(published.path).to_dicts()
    assert _sorted(rows) == WANTED


def test_duckdb_reads_it(published: tables.TableRef) -> None:
    """DuckDB reads every value of a gold table, through delta-rs."""
    import duckdb

    things = duckdb.from_arrow(_read_by_delta_rs(published))
    found = things.query("things", "SELECT _id, long, nested.a.b, nested.list[2].c FROM things ORDER BY __key").fetchall()
    assert found == [("65f0c0ffee0123456789abcd", 5000000000, 1, "y"), ("c", None, None, None)]


def _read_by_delta_rs(table: tables.TableRef) -> pa.Table:
    """The rows that delta-rs queries return; its queries support deletion vectors."""
    import deltalake

    found = deltalake.QueryBuilder().register("things", deltalake.DeltaTable(table.path)).execute("SELECT * FROM things")
    return pa.table(found)


def _asked(spark: SparkSession, table: tables.TableRef) -> set[str]:
    """The features that a table requires of its readers."""
    detail = spark.sql(f"DESCRIBE DETAIL {table}").first()
    assert detail is not None
    asked = set(detail.tableFeatures) & {"deletionVectors", "columnMapping", "typeWidening", "variantType", "v2Checkpoint"}
    assert detail.minReaderVersion == (3 if asked else 1)
    return asked


def _sorted(rows: list[Row]) -> list[Row]:
    return [_plain(row) for row in sorted(rows, key=lambda row: str(row["_id"]))]


def _mapping(value: Any) -> dict[str, str]:
    """A map, which readers return as a mapping, or as a list of pairs or of structs."""
    if isinstance(value, dict):
        return value
    return dict(tuple(item.values()) if isinstance(item, dict) else item for item in value)


def _plain(row: Row) -> Row:
    found = {name: value for name, value in row.items() if value is not None and name != "__key"}
    if "__rescued" in found:
        found["__rescued"] = _mapping(found["__rescued"])
    return found


class Shop:
    """A lakehouse with a directly written bronze table, one collection, and silver and gold."""

    def __init__(self, spark: SparkSession, root: Path, **silver: Any) -> None:
        self.spark, self.root, self.silver_options = spark, root, silver
        self.layout = delta.layout(_settings(root).lakehouse)
        self.log = bronze_rows.Log(spark, self.layout.bronze("hand"))
        self.gold_table = self.layout.gold(bronze_rows.DB, "things")
        self.silver_table = self.layout.silver(bronze_rows.DB, "things")
        self.at = 0

    def change(self, *events: Row) -> None:
        """Append events as the next batch and run silver."""
        self.log.append({"things": [event | {"at": self.at + number} for number, event in enumerate(events, 1)]})
        self.at += len(events)
        silver.run(self.spark, _settings(self.root, **self.silver_options), sessions=sessions.kept(self.spark))

    def publish(self, *, vectors: bool | None = None) -> tuple[gold.GoldTableResult, ...]:
        chosen = _settings(self.root, vectors=vectors, **self.silver_options)
        return gold.run(self.spark, chosen, sessions=sessions.kept(self.spark)).collections

    def rows(self, table: tables.TableRef) -> dict[str, Row]:
        """The documents of a table by key, without silver's own columns."""
        found = layers.table_rows(self.spark, table)
        assert len({row["__key"] for row in found}) == len(found), "a key has two rows"
        return {
            row["__key"]: {name: value for name, value in row.items() if value is not None and name[:2] != "__"}
            for row in found
        }

    def is_published(self) -> bool:
        return self.rows(self.gold_table) == self.rows(self.silver_table)

    def operations(self, table: tables.TableRef) -> list[str]:
        """The operations on a table, newest first."""
        return [row.operation for row in self.spark.sql(f"DESCRIBE HISTORY {table}").collect()]

    def maintain(self, table: tables.TableRef) -> None:
        """OPTIMIZE and VACUUM without a retention of old versions."""
        self.spark.sql(f"OPTIMIZE {table}").collect()
        with query_execution.session_confs(self.spark, {"spark.databricks.delta.retentionDurationCheck.enabled": "false"}):
            self.spark.sql(f"VACUUM {table} RETAIN 0 HOURS").collect()


def put(key: int, v: object, *, op: str = "c") -> Row:
    return {"op": op, "key": key, "after": {"_id": key, "v": v}}


def gone(key: int) -> Row:
    return {"op": "d", "key": key}


@pytest.mark.journey
def test_deletion_vectors_are_switched_both_ways(spark: SparkSession, lakehouse: Path) -> None:
    """When off, a table requires no reader feature and files with changed rows are rewritten; when on, the rows are marked in place. A
    switch is applied even if no rows changed, and even after an earlier switch was killed. Without the setting a table stays as it is.
    """
    shop = Shop(spark, lakehouse)
    shop.change(*(put(key, 1) for key in range(6)))
    shop.publish()
    shop.change(put(1, 2, op="u"), gone(2), put(9, 2))
    shop.publish()
    assert shop.is_published() and _asked(spark, shop.gold_table) == {"deletionVectors"}
    first = shop.operations(shop.gold_table)
    assert shop.publish(vectors=False) == ()
    assert shop.is_published() and _asked(spark, shop.gold_table) == set()
    shop.change(put(1, 3, op="u"), gone(3), put(2, 3))
    (published,) = shop.publish()
    assert shop.is_published() and _asked(spark, shop.gold_table) == set() and not published.rewritten
    assert "MERGE" not in first and "MERGE" not in shop.operations(shop.gold_table)
    shop.change(put(1, 4, op="u"), gone(4))
    (published,) = shop.publish(vectors=True)
    assert shop.is_published() and _asked(spark, shop.gold_table) == {"deletionVectors"} and not published.rewritten
    assert "MERGE" not in shop.operations(shop.gold_table)
    # the first step of a switch, before it rewrites files and removes the feature
    spark.sql(f"ALTER TABLE {shop.gold_table} SET TBLPROPERTIES ('delta.enableDeletionVectors' = 'false')")
    assert shop.publish(vectors=False) == ()
    assert shop.is_published() and _asked(spark, shop.gold_table) == set()


def test_silver_was_optimized_and_vacuumed(spark: SparkSession, lakehouse: Path) -> None:
    """Gold reads silver's newest version if its content is that of silver's position: older files may be removed."""
    shop = Shop(spark, lakehouse)
    shop.change(put(1, 1), put(2, 1))
    shop.publish()
    shop.change(put(1, 2, op="u"), gone(2), put(3, 2))
    shop.maintain(shop.silver_table)
    shop.publish()
    assert shop.is_published()
    shutil.rmtree(str(shop.gold_table.path))
    spark._jvm.org.apache.spark.sql.delta.DeltaLog.clearCache()
    shop.publish()
    assert shop.is_published()


def test_what_is_marked_and_small_is_compacted(
    spark: SparkSession, lakehouse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silver and gold compact their tables when they have many files, and the positions stay."""
    monkeypatch.setattr(maintenance, "MANY_FILES", 2)
    monkeypatch.setattr(maintenance, "FEW_ROWS", 0)
    shop = Shop(spark, lakehouse)
    for v in range(3):
        shop.change(*(put(key, v, op="u") for key in range(v, 5)))
        shop.publish()
    assert "OPTIMIZE" in shop.operations(shop.gold_table) and "OPTIMIZE" in shop.operations(shop.silver_table)
    assert shop.is_published() and shop.publish() == ()


@pytest.mark.parametrize("change", ["DROP COLUMN v", "RENAME COLUMN v TO w"])
def test_a_column_that_somebody_took_away_comes_back_with_its_values(
    spark: SparkSession, lakehouse: Path, change: str
) -> None:
    """If gold added the column again, it would be null in all existing rows."""
    shop = Shop(spark, lakehouse)
    shop.change(put(1, 1), put(2, 2))
    shop.publish()
    spark.sql(f"ALTER TABLE {shop.gold_table} SET TBLPROPERTIES ('delta.columnMapping.mode' = 'name')")
    spark.sql(f"ALTER TABLE {shop.gold_table} {change}")
    shop.change(put(3, 3))
    shop.publish()
    assert shop.is_published()


def test_a_late_delete_takes_nothing_away(spark: SparkSession, lakehouse: Path) -> None:
    """A delete that arrives after a later event of its key is remembered, and the document stays in gold."""
    shop = Shop(spark, lakehouse)
    shop.change(put(1, 1), put(2, 1))
    shop.publish()
    shop.at = 100
    shop.change(put(1, 2, op="u"))
    shop.publish()
    shop.at = 50
    shop.change(gone(1), gone(2))
    shop.publish()
    assert shop.rows(shop.gold_table).keys() == {"1"} and shop.is_published()


def test_a_delete_that_silver_noted_and_never_applied_takes_nothing_away(spark: SparkSession, lakehouse: Path) -> None:
    """Silver was killed between the two steps. Before its next run the settings change to keep the rows of deleted documents."""
    shop = Shop(spark, lakehouse)
    shop.change(put(1, 1), put(2, 1))
    shop.publish()
    layers.killed_at(lambda: shop.change(gone(1)), Writer, "replace_arrow", after=False)
    assert spark.table(str(shop.layout.deletes(bronze_rows.DB, "things"))).count() == 1
    shop.silver_options = {"defaults": {"delete.tombstone.handling.mode": "drop"}}
    shop.at += 1
    shop.change(put(3, 1))
    shop.publish()
    assert shop.rows(shop.gold_table).keys() == {"1", "2", "3"} and shop.is_published()


def test_a_log_is_one_batch_up_to_where_the_tables_are(spark: SparkSession, tmp_path: Path) -> None:
    """The batches before it may be millions, and no cut is possible in them any more; later batches are cut as before."""
    table = tables.TableRef.at(str(tmp_path / "log"))
    log = bronze_rows.Log(spark, table)
    for number in range(1, 7):
        log.append({"things": [put(number, number) | {"at": 10 * number}]})
    some, every = (published_cut._batches(spark, table, 6, at=at) for at in (5, 0))
    assert sorted(each.number for each in some) == [4, 5, 6] and len(every) == 6
    ends = [[each for each in cut.boundaries(found, complete_time=None) if each.batch >= 5] for found in (some, every)]
    assert ends[0] == ends[1] != []


@pytest.mark.parametrize("place", ["", "zzz"])
def test_an_event_without_a_place_in_the_order_bars_no_cut(spark: SparkSession, tmp_path: Path, place: str) -> None:
    """It goes to quarantine. It is neither later nor earlier than the batches around it."""
    log = bronze_rows.Log(spark, tables.TableRef.at(str(tmp_path / "log")))
    log.append({"things": [put(1, 1) | {"at": 10}]})
    log.batch += 1
    log._write([log._row("things", put(2, 2) | {"at": 15}) | {"sequence": place}])
    log.append({"things": [put(3, 3) | {"at": 20}]})
    found = published_cut._batches(spark, log.table, 3, at=0)
    boundaries = cut.boundaries(found, complete_time=f"{30:08x}{1:08x}")
    assert [(each.batch, each.time[:8]) for each in boundaries] == [(1, "0000000a"), (2, "0000000a"), (3, "00000014")]


@pytest.mark.parametrize(("steps", "seed"), [(3, 1), pytest.param(60, 2, marks=pytest.mark.journey)])
def test_gold_is_what_silver_holds(spark: SparkSession, lakehouse: Path, steps: int, seed: int) -> None:
    """This holds after any changes, with deletion vectors switched on and off, and with OPTIMIZE, VACUUM and RESTORE of both tables
    between them.
    """
    shop, rng = Shop(spark, lakehouse), random.Random(seed)
    shop.change(*(put(key, 0) for key in range(20)))
    for step in range(1, steps + 1):
        for _ in range(rng.randint(0, 2)):
            keys = rng.sample(range(30), rng.randint(1, 12))
            shop.change(*(gone(key) if rng.random() < 0.3 else put(key, step, op="u") for key in keys))
        match rng.randrange(6):
            case 0:
                shop.maintain(shop.silver_table)
            case 1 if step > 1:
                shop.maintain(shop.gold_table)
            case 2:
                restored = rng.choice([shop.silver_table, shop.gold_table] if step > 1 else [shop.silver_table])
                version = max(table_history.version(spark, restored) - rng.randint(1, 3), 2)
                try:
                    spark.sql(f"RESTORE TABLE {restored} TO VERSION AS OF {version}").collect()
                except Exception as error:  # vacuumed versions cannot be restored
                    assert "Not all files from version" in str(error)
                shop.change()
        shop.publish(vectors=rng.choice([None, None, True, False]))
        assert shop.is_published(), step
