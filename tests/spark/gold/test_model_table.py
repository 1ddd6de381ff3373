"""What an incremental model reads of its tables, the rows of some keys, and how its own table takes in changed keys: in deletion vectors,
if the setting allows it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
from pyspark.errors import PySparkException

from cdc_core.models import sql_model
from pipelines.delta import maintenance
from pipelines.delta import tables as delta
from pipelines.delta.writer import Writer
from pipelines.gold import current, model_keys, model_table
from pipelines.gold.candidate import no_audit
from tests.harness import gold_shop, oracle

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

KEYS: dict[str, tuple[str, list[tuple[object, ...]], int]] = {
    "texts": ("text", [("k'0001",), ("k'0002",), ("k'0025",)], 2),
    "numbers": ("number", [(1,), (25,)], 2),
    "null": ("number", [(None,)], 1),
    "null and a number": ("number", [(None,), (1,)], 2),
    "several columns": ("number, text", [(1, "k'0001"), (25, "k'0025"), (1, "k'0025")], 2),
    "many": ("text", [(f"k'00{number}",) for number in range(21, 27)], 1),
    "many numbers": ("number", [(number,) for number in range(21, 27)], 2),
    "days": ("day", [(date(1970, 1, 2),)], 3),
}
"""Columns, keys, and how many files are read of three. Each has ten rows; the second has a null instead of the number 13."""


@pytest.fixture(scope="module")
def table(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A table of three files."""
    path = str(tmp_path_factory.mktemp("rows"))
    spark.range(0, 30, 1, 3).selectExpr(
        "id", "nullif(id, 13) AS number", "concat(\"k'\", lpad(id, 4, '0')) AS text", "date_from_unix_date(id) AS day"
    ).write.format("delta").save(path)
    return f"delta.`{path}`"


@pytest.mark.parametrize("named", KEYS)
def test_only_files_that_may_have_the_keys_are_read(
    spark: SparkSession, table: str, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    """The rows are all that have one of the keys. Delta skips files by literals only, and read the whole table for one key."""
    monkeypatch.setattr(current, "FEW_KEYS", 4)
    rows, (names, values, files) = spark.table(table), KEYS[named]
    columns = names.split(", ")
    model = sql_model.parse(
        "m",
        f"{{{{ config(materialized='incremental', unique_key={columns}) }}}} SELECT id, {names} FROM {{{{ ref('a.t', key={columns}) }}}}",
        where="m.sql",
    )
    inputs: Any = SimpleNamespace(relation=lambda _: table)
    of_model = model_table.ModelTable(spark, model, inputs, no_audit)
    keys = spark.createDataFrame(values, rows.select(columns).schema)
    with of_model._of_keys(keys, model_keys.spans(keys)) as found:
        assert len(found.inputFiles()) == files
        kept = [row for row in rows.select("id", *columns).collect() if row[1:] in values]
        assert sorted(found.collect()) == sorted(kept) != []


TOTALS = """\
{{ config(materialized='incremental', unique_key='customer') }}
SELECT customer, sum(amount) AS total FROM {{ ref('cases.orders', key='customer') }} GROUP BY customer
"""
AFTER = "SELECT * FROM {{ ref('times') }}"
ALL = "SELECT sum(total) AS total FROM {{ ref('totals') }}"


def _noting(act: Callable[..., Any], ways: list[str]) -> Callable[..., Any]:
    """The function, whose calls are noted."""

    def noted(*given: Any, **named: Any) -> Any:
        ways.append(act.__name__)
        return act(*given, **named)

    return noted


def _sums(orders: Iterable[Any]) -> list[dict[str, Any]]:
    """The rows of `SUMS` over these documents."""
    groups: dict[tuple[Any, Any], list[Any]] = {}
    for row in orders:
        groups.setdefault((row.customer, row.note), []).append(row)
    return [
        {"customer": customer, "note": note, "total": total, "ids": sorted(row._id for row in rows)}
        for (customer, note), rows in groups.items()
        if (total := sum(row.amount for row in rows)) > 3
    ]


def _made(spark: SparkSession, root: Path, files: Mapping[str, str]) -> gold_shop.Shop:
    made = gold_shop.made(spark, root, files)
    made.change("orders", *({"_id": n, "customer": n % 4 or None, "amount": n} for n in range(12)))
    assert set(made.run().values()) == {"whole"}
    return made


SUMS = """\
{{ config(materialized='incremental', unique_key=['customer', 'note']) }}
SELECT customer, note, sum(amount) AS total, collect_list(_id) AS ids FROM {{ ref('cases.orders', key=['customer', 'note']) }}
GROUP BY customer, note HAVING sum(amount) > 3
"""


@pytest.mark.parametrize("vectors", [True, pytest.param(False, marks=pytest.mark.journey)])
def test_few_keys_are_replaced_without_sparks_steps(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vectors: bool
) -> None:
    """As Spark's steps do it: keys of several columns, null ones, new ones, those without a row, and changes that cancel out."""
    rng, made = random.Random(3), gold_shop.made(spark, tmp_path, {"sums": SUMS})
    made.settings = replace(made.settings, gold=replace(made.settings.gold, deletion_vectors=vectors))
    ways: list[str] = []
    for name in ("upsert", "merge"):
        monkeypatch.setattr(Writer, name, _noting(getattr(Writer, name), ways))

    def change(count: int) -> None:
        documents = [
            {"_id": rng.randrange(40), "customer": rng.choice([None, 1, 2, 7]), "note": rng.choice([None, "", "7", "é"])}
            for _ in range(count)
        ]
        gone = tuple(rng.sample(range(40), 5))
        made.change("orders", *({**each, "amount": rng.randrange(4)} for each in documents), gone=gone)

    change(40)
    assert made.run() == {"sums": "whole"}
    for few in (1000, 0, 1000):  # both ways continue what the other one has written
        monkeypatch.setattr(model_keys, "FEW_KEYS", few)
        change(3)
        ways.clear()
        assert made.run() == {"sums": "changed"}
        assert bool(ways) is (not few)
        expected = _sums(made.spark.table(str(delta.layout(made.settings.lakehouse).gold("cases", "orders"))).collect())
        rows = oracle.read(delta.layout(made.settings.lakehouse).model("sums").path or "").to_pylist()
        assert sorted(map(repr, ({**row, "ids": sorted(row["ids"])} for row in rows))) == sorted(map(repr, expected))


@pytest.mark.journey  # minutes on a slow machine
@pytest.mark.parametrize("few", [1000, 0])
def test_an_incremental_model_has_deletion_vectors_as_the_setting_says(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few: int
) -> None:
    """A changed key rewrote the file that it was in. The setting is also applied if no rows changed; without it a table stays as it is; a
    model that is always made whole has none.
    """
    monkeypatch.setattr(model_keys, "FEW_KEYS", few)
    made = _made(spark, tmp_path, {"totals": TOTALS, "all": ALL})
    place = delta.layout(made.settings.lakehouse).model

    def run(vectors: bool | None) -> tuple[str, bool]:
        """What a run with this setting did, and whether readers must support deletion vectors after it."""
        made.settings = replace(made.settings, gold=replace(made.settings.gold, deletion_vectors=vectors))
        did = made.run()["totals"]
        assert not delta.features(spark, place("all"))
        return did, "deletionVectors" in delta.features(spark, place("totals"))

    def operations() -> list[str]:
        return [row.operation for row in spark.sql(f"DESCRIBE HISTORY {place('totals')}").collect()]

    files = {*spark.table(str(place("totals"))).inputFiles()}
    made.change(
        "orders", {"_id": 6, "customer": 2, "amount": 60}, {"_id": 12, "customer": None, "amount": 3}, gone=(3, 7, 11)
    )
    assert run(None) == ("changed", True)
    assert made.rows("totals") == {(None, 15), (1, 15), (2, 72)} and made.rows("all") == {(102,)}
    assert files & {*spark.table(str(place("totals"))).inputFiles()} and "MERGE" not in operations()
    assert run(False) == ("nothing", False)
    made.change("orders", {"_id": 6, "customer": 1, "amount": 6}, gone=(12, 3, 7, 11))
    assert run(False) == ("changed", False)
    assert run(None) == ("nothing", False)
    assert made.rows("totals") == {(None, 12), (1, 21), (2, 12)} and ("MERGE" in operations()) is (not few)
    assert run(True) == ("nothing", True)


@pytest.mark.journey  # minutes on a slow machine
def test_a_version_whose_files_cannot_be_compacted_is_published(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run failed with "Nothing was published", and models over this one were not made."""
    made = _made(spark, tmp_path, {"totals": TOTALS, "all": ALL})
    made.change("orders", {"_id": 5, "customer": 2, "amount": 50})
    monkeypatch.setattr(maintenance, "compact", Mock(side_effect=PySparkException("Job aborted: a task was lost")))
    assert made.run() == {"totals": "changed", "all": "whole"}
    assert made.rows("all") == {(111,)}


@pytest.mark.journey  # minutes on a slow machine
def test_a_full_refresh_that_ends_early_reaches_the_models_over_it(spark: SparkSession, tmp_path: Path) -> None:
    """A model had other rows at the same position, and the models over it stayed as they were until one of its tables changed."""
    made = _made(
        spark, tmp_path, {"times": "SELECT max(amount) AS n, now() AS at FROM {{ ref('cases.orders') }}", "after": AFTER}
    )
    stop = Mock(is_set=Mock(side_effect=[False, True]))
    assert made.run(is_anew=True, stop=stop) == {"times": "whole"}
    assert made.rows("after") != made.rows("times")
    assert made.run() == {"times": "nothing", "after": "whole"}
    assert made.rows("after") == made.rows("times")
    assert set(made.run().values()) == {"nothing"}
