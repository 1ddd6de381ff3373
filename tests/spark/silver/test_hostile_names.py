"""Names and keys with a meaning for some parser, through silver to gold, and a collection that fails among others."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cdc_core import errors
from pipelines.delta import tables as delta
from tests.harness.layers import Hop, document, pipeline, plain, rows_by_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FIELDS = (
    *(
        "_metadata",
        "__action",
        "__guard",
        "__gone",
        "__key",
        "__batch",
        "_change_type",
        "__document",
        "__rescued",
        "__deleted",
    ),
    *("adı", "adi", "µg", "μg", "ſ", "s", "S", "ß", "ss", "K", "k", "İ", "i"),
    *(
        "",
        " ",
        ".",
        "a.b",
        "`",
        "a`b",
        "'",
        '"',
        "\\",
        "${env:HOME}",
        "$x",
        "a\nb",
        "\x01",
        "x" * 300,
        "名前",
        "🙂",
        "select",
        "*",
    ),
)
KEYS = ("${env:HOME}", "${spark.app.name}", "a'b\\", "`", '"', "\n", "\u2028", "🙂", "", "%", "\\u0041", "zzz${")
COLLECTIONS = ("ы" * 120, "${env:HOME}", "a.b`c d'e", "tmp.agg_out.1")


def documents(hop: Hop, collection: str) -> list[dict[str, Any]]:
    """Gold's rows, read by Spark, whose parser might misread a name."""
    table = hop.gold_table(collection)
    return [plain(row) for row in rows_by_spark(hop.spark, table)] if delta.exists(hop.spark, table) else []


@pytest.mark.journey
def test_hostile_names(spark: SparkSession, tmp_path: Path) -> None:
    """Every field has its own column, every key one row, and every collection its table, except the temporary ones of `$out`. A failing
    collection is named, and the others continue in both layers.
    """
    hop = Hop(spark, pipeline(tmp_path))
    foreign = hop.silver_table("foreign")
    spark.range(1).write.format("delta").save(str(foreign.path))
    inserted = [{"op": "c", "key": key, "at": 10 + at, "after": {"_id": key, "v": 1}} for at, key in enumerate(KEYS)]
    wide = {"_id": 1, **{name: at for at, name in enumerate(FIELDS)}, "n": {name: at for at, name in enumerate(FIELDS)}}
    first: dict[str, Any] = {name: [document(1, 10, "c", v=1)] for name in (*COLLECTIONS, "foreign")}
    hop.bronze.append({**first, "keys": inserted, "wide": [{"op": "c", "key": 1, "at": 10, "after": wide}]})
    for layer in (hop.silver, hop.gold):
        with pytest.raises(errors.TableNotOurs, match="foreign"):
            layer()
    updated = [{"op": "u", "key": key, "at": 40 + at, "after": {"_id": key, "v": 2}} for at, key in enumerate(KEYS[1:])]
    gone = [{"op": "d", "key": KEYS[0], "at": 60}]
    hop.bronze.append({"keys": [*updated, *gone], COLLECTIONS[0]: [document(1, 40, v=2)]})
    for layer in (hop.silver, hop.gold):
        with pytest.raises(errors.TableNotOurs, match="foreign"):
            layer()
    assert sorted((row["_id"], row["v"]) for row in documents(hop, "keys")) == sorted((key, 2) for key in KEYS[1:])
    [row] = documents(hop, "wide")
    assert sorted(value for value in row.values() if isinstance(value, int)) == sorted([1, *range(len(FIELDS))])
    assert sorted(row["n"].values()) == list(range(len(FIELDS)))
    assert [len(documents(hop, name)) for name in COLLECTIONS] == [1, 1, 1, 0]
    assert documents(hop, COLLECTIONS[0])[0]["v"] == 2
    assert not Path(str(hop.silver_table(COLLECTIONS[-1]).path)).exists()
