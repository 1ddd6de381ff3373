"""The gate: new versions of gold tables are validated before readers see them."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from cdc_core import errors
from cdc_core.expectations import suite as suites
from cdc_core.tables.layout import Layer
from pipelines.delta import ops_tables
from pipelines.delta import tables as delta
from pipelines.demo import quality
from pipelines.gold import current, expectations, in_process, models, publish
from pipelines.gold import great_expectations as library
from pipelines.gold import run as gold
from pipelines.gold.candidate import Audit, Candidate, selected
from pipelines.operations import rebuild
from pipelines.silver import run as silver
from tests.harness import bronze_rows, gold_shop, oracle

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from cdc_core.settings.parse import Settings
    from cdc_core.tables import layout as tables

TOTALS = """\
{{ config(materialized='incremental', unique_key='customer') }}
SELECT customer, sum(amount) AS total FROM {{ ref('cases.orders', key='customer') }} GROUP BY customer
"""
SUITE = """\
expectations:
  - type: expect_column_values_to_be_between
    kwargs: {column: total, min_value: 0}
  - type: expect_column_sum_to_be_between
    kwargs: {column: total, max_value: 1000}
  - type: expect_column_values_to_be_between
    kwargs: {column: total, max_value: 50}
    severity: warning
"""


def results(spark: SparkSession, settings: Settings) -> list[dict[str, Any]]:
    """The rows of `ops/expectations`, oldest first."""
    table = delta.layout(settings.lakehouse).ops("expectations")
    return sorted(ops_tables.rows(spark, table, expectations.SCHEMA).to_pylist(), key=lambda row: row["at_ms"])


def test_a_refused_version_of_a_model_leaves_the_last_good_one(spark: SparkSession, tmp_path: Path) -> None:
    """If a critical expectation fails, readers keep the last good version; failed warnings are recorded and the version is published.
    Expectations about rows only check changed rows.
    """
    shop = gold_shop.made(spark, tmp_path, {"totals": TOTALS}, suites={"totals.yml": SUITE})
    gate = expectations.Gate.of(shop.settings)
    shop.change("orders", {"_id": 1, "customer": 1, "amount": 5}, {"_id": 2, "customer": 2, "amount": 60})
    assert shop.run(audit=gate) == {"totals": "whole"}
    assert [(row["judged"], row["is_met"], row["is_published"]) for row in results(spark, shop.settings)] == [
        ("whole", True, True),
        ("whole", True, True),
        ("whole", False, True),
    ]

    shop.change("orders", {"_id": 3, "customer": 1, "amount": -9})
    judged: dict[str, models.ModelVerdict] = {}
    with pytest.raises(errors.GateFailed) as refused:
        shop.run(audit=gate, judged=judged)
    assert refused.value.exit_code == 3
    assert str(refused.value).splitlines() == [
        "totals: the new version is not published, the last good one (if any) stays; ops/expectations has the results",
        "  expect_column_values_to_be_between of total: 1 of 1 changed rows do not meet it, for example with the keys 1",
    ]
    assert shop.rows("totals") == {(1, 5), (2, 60)}
    failed = [row for row in results(spark, shop.settings) if row["severity"] == "critical" and not row["is_met"]]
    assert [(row["columns"], row["unexpected"], row["rows"], row["examples"], row["is_published"]) for row in failed] == [
        (["total"], 1, 1, ["1"], False)
    ]

    noted = len(results(spark, shop.settings))
    assert shop.run(audit=gate, judged=judged) == {"totals": "failed"}
    assert len(results(spark, shop.settings)) == noted, "the same rows were judged again"

    shop.change("orders", {"_id": 3, "customer": 1, "amount": 1})

    class Killed(Audit):
        def __call__(self, session: SparkSession, candidate: Candidate) -> Mapping[str, object]:
            gate(session, candidate)
            raise KeyboardInterrupt

        judges = gate.judges

    with pytest.raises(KeyboardInterrupt):
        shop.run(audit=Killed())
    assert shop.rows("totals") == {(1, 5), (2, 60)}
    assert shop.run(audit=gate, judged=judged) == {"totals": "changed"}
    assert shop.rows("totals") == {(1, 6), (2, 60)}
    assert [row["judged"] for row in results(spark, shop.settings)[-3:]] == ["changed", "whole", "whole"]


WARNINGS = """\
expectations:
  - type: expect_column_values_to_be_between
    kwargs: {column: total, max_value: 50}
    severity: warning
  - type: expect_column_values_to_not_be_null
    kwargs: {column: discount}
    severity: info
  - type: expect_column_values_to_be_null
    kwargs: {column: __rescued}
  - type: expect_column_values_to_not_be_null
    kwargs: {column: customer}
"""


def test_a_warning_stays_unmet_as_long_as_its_rows(spark: SparkSession, tmp_path: Path) -> None:
    """A version that changes other rows does not clear it. If a column does not exist yet, a warning about it stops nothing."""
    settings = gold_shop.made(spark, tmp_path, {}, suites={"totals.yml": WARNINGS}).settings
    gate, table = expectations.Gate.of(settings), delta.layout(settings.lakehouse).model("totals")
    live: Mapping[str, object] = {}

    def judged(totals: Mapping[int, int], *changed: int) -> list[tuple[Any, ...]]:
        """The results of a version in which the rows of these customers are new."""
        nonlocal live

        def frame(customers: Iterable[int]) -> DataFrame:
            rows = ", ".join(f"({customer}, {totals[customer]}L)" for customer in customers)
            return spark.sql(f"SELECT * FROM VALUES {rows} AS (customer, total)")

        new = frame(changed) if changed else None
        live = gate(
            spark,
            Candidate("totals", table, lambda names: selected(frame(totals), names), new, keys=("customer",), live=live),
        )
        rows = results(spark, settings)[-4:]
        return [(row["judged"], row["is_met"], row["rows"], row["unexpected"], row["failure"]) for row in rows]

    absent = ("whole", False, None, None, "no column discount")
    met = ("whole", True, 2, 0, None)
    assert judged({1: 5, 2: 60}) == [("whole", False, 2, 1, None), absent, met, met]
    met = ("changed", True, 1, 0, None)
    assert judged({1: 11, 2: 60}, 1) == [("whole", False, 2, 1, None), absent, met, met]
    assert judged({1: 11, 2: 6}, 2) == [("whole", True, 2, 0, None), absent, met, met]
    assert judged({1: 12, 2: 6}, 1) == [met, absent, met, met]


DOTTED = {
    ("expect_column_values_to_not_be_null", ("odd.name",)): ({"column": "odd.name"}, True, ()),
    ("expect_column_values_to_be_between", ("odd.name",)): ({"column": "odd.name", "max_value": 50}, False, ("2",)),
    ("expect_column_max_to_be_between", ("odd.name",)): ({"column": "odd.name", "max_value": 60}, True, ()),
    ("expect_column_pair_values_to_be_equal", ("_id", "odd.name")): (
        {"column_A": "_id", "column_B": "odd.name"},
        False,
        ("1", "2"),
    ),
    ("expect_compound_columns_to_be_unique", ("odd.name", "a")): ({"column_list": ["odd.name", "a"]}, True, ()),
    ("expect_column_values_to_be_in_set", ("odd.field",)): ({"column": "odd.field", "value_set": [7]}, False, ("2",)),
    ("expect_column_values_to_be_between", ("a`b",)): ({"column": "a`b", "max_value": 1}, False, ("2",)),
    ("expect_column_max_to_be_between", ("*",)): ({"column": "*", "max_value": 3}, True, ()),
    ("expect_table_row_count_to_equal", ()): ({"value": 2}, True, ()),
}
"""Expectations by type and columns, with whether they are met, and the keys of the rows that do not meet them."""


def test_a_column_that_is_named_like_a_path_is_judged(spark: SparkSession) -> None:
    """The name means the table's column, if there is one with this name, and otherwise the field of a struct. The same holds for names
    that Spark would interpret.
    """
    rows = spark.sql(
        "SELECT 1 AS _id, 5 AS `odd.name`, 1 AS a, struct(7 AS field) AS odd, 1 AS `a``b`, 3 AS `*` "
        "UNION ALL SELECT 2, 60, 1, struct(8 AS field), 2, 3"
    )
    listed = [{"type": type_, "kwargs": kwargs} for (type_, _), (kwargs, _, _) in DOTTED.items()]
    suite = suites.parse({"expectations": listed}, name="a", where="a.yml").expectations
    assert [(each.type, each.columns) for each in suite] == list(DOTTED)
    found = library.judged(rows, suite, keys=("_id",))
    assert [each.failure for each in found] == [None] * len(DOTTED)
    assert [(each.is_met, each.examples) for each in found] == [(is_met, keys) for _, is_met, keys in DOTTED.values()]
    said = [json.loads(each.result)["expectation_config"]["kwargs"] for each in found]
    assert all({name: kwargs[name] for name in given} == given for kwargs, (given, _, _) in zip(said, DOTTED.values()))


def documents_with(spark: SparkSession, folder: Path, suite: str) -> tuple[Settings, tables.Layout, bronze_rows.Log]:
    """The settings of a lakehouse without models, whose collection `things` has the suite; its tables, and its bronze."""
    settings = gold_shop.made(spark, folder, {}, suites={"things.json": suite}).settings
    settings = dataclasses.replace(settings, gold=dataclasses.replace(settings.gold, models=None))
    layout = delta.layout(settings.lakehouse)
    return settings, layout, bronze_rows.Log(spark, layout.bronze(settings.name))


def test_a_refused_version_of_documents_hinders_no_other_table(spark: SparkSession, tmp_path: Path) -> None:
    """The collection stays at its last good version until a later one meets its suite, and other collections are published. Uniqueness is
    checked in the whole table.
    """
    suite = (
        '{"table": "cases.things", "expectations": ['
        '{"type": "expect_column_values_to_not_be_null", "kwargs": {"column": "n"}},'
        '{"type": "expect_column_values_to_be_unique", "kwargs": {"column": "n"}}]}'
    )
    settings, layout, log = documents_with(spark, tmp_path, suite)

    def rows(collection: str) -> set[tuple[Any, ...]]:
        held = oracle.read(layout.gold("cases", collection).path or "", columns=["_id", "n"])
        return {tuple(row.values()) for row in held.to_pylist()}

    def run(**changes: list[dict[str, Any]]) -> None:
        log.append(changes)
        silver.run(spark, settings)
        publish.run(spark, settings)

    def document(key: int, n: int | None, at: int) -> dict[str, Any]:
        return {"op": "u", "key": key, "at": at, "after": {"_id": key, "n": n}}

    run(things=[document(1, 1, 10), document(2, 2, 10)], others=[document(1, 1, 10)])
    with pytest.raises(errors.GateFailed) as refused:
        run(things=[document(3, 1, 11), document(4, None, 12)], others=[document(1, 5, 13)])
    assert (
        "expect_column_values_to_not_be_null of n: 1 of 2 changed rows do not meet it, for example with the keys 4"
        in str(refused.value)
    )
    assert "expect_column_values_to_be_unique of n: 2 of 4 rows do not meet it" in str(refused.value)
    with pytest.raises(errors.GateFailed, match="2 of 4 rows do not meet it"):
        rebuild.run(spark, settings, collection="cases.things", layer=Layer.GOLD)
    assert (rows("things"), rows("others")) == ({(1, 1), (2, 2)}, {(1, 5)})
    run(things=[document(3, 3, 14), document(4, 4, 15)])
    assert rows("things") == {(1, 1), (2, 2), (3, 3), (4, 4)}
    assert gold.run(spark, settings).changed == 0


def test_changed_documents_are_judged_without_a_query_over_the_tables(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Types of all kinds, deletes and new columns; a refused version leaves the table's columns, too. More rows are read by Spark."""
    suite = (
        '{"table": "cases.things", "expectations": ['
        '{"type": "expect_column_values_to_be_between", "kwargs": {"column": "n", "min_value": 0}},'
        '{"type": "expect_column_values_to_be_between", "kwargs": {"column": "at", "min_value": "2024-01-01", "max_value": "2026-01-01"}},'
        '{"type": "expect_column_values_to_be_unique", "kwargs": {"column": "n"}},'
        '{"type": "expect_table_row_count_to_be_between", "kwargs": {"max_value": 2}}]}'
    )
    settings, layout, log = documents_with(spark, tmp_path, suite)

    def run(*events: dict[str, Any]) -> list[dict[str, Any]]:
        log.append({"things": [*events]})
        silver.run(spark, settings)
        publish.run(spark, settings)
        return oracle.rows(oracle.read(layout.gold("cases", "things").path or ""), by="__key")

    def document(key: int, n: int, at: int, **more: Any) -> dict[str, Any]:
        after = {
            "_id": key,
            "n": n,
            "at": {"$date": {"$numberLong": "1750000000000"}},
            "price": {"$numberDecimal": "1.50"},
            "lines": [
                {"sku": {"$oid": "0123456789abcdef01234567"}, "raw": {"$binary": {"base64": "AA==", "subType": "00"}}}
            ],
            **more,
        }
        return {"op": "u", "key": key, "at": at, "after": after}

    first = run(document(1, 1, 10), document(2, 2, 10))
    with monkeypatch.context() as patch:
        patch.setattr(current.GoldTable, "merged", lambda *_: pytest.fail("by Spark"))
        patch.setattr(current.GoldTable, "current", lambda *_: pytest.fail("by Spark"))
        second = run(document(1, 5, 11), document(3, 3, 11), {"op": "d", "key": 2, "at": 12})
        assert second == [{**first[0], "n": 5}, {**first[0], "_id": 3, "n": 3, "__key": "3"}]
        assert [row["judged"] for row in results(spark, settings)[-4:]] == ["changed", "changed", "whole", "whole"]
        with pytest.raises(errors.GateFailed, match="unique of n: 2 of 2 rows do not meet it, for example with the keys"):
            run(document(1, 3, 12))
        with pytest.raises(errors.GateFailed, match="1 of 1 changed rows do not meet it, for example with the keys 1"):
            run(document(1, -1, 13, late=1))
        held = oracle.read(layout.gold("cases", "things").path or "")
        assert oracle.rows(held, by="__key") == second and "late" not in held.column_names
        third = run(document(1, 6, 14, late=2))
        assert [(row["n"], row.get("late")) for row in third] == [(6, 2), (3, None)]
    monkeypatch.setattr(in_process, "JUDGED_BYTES", 0)
    with pytest.raises(errors.GateFailed, match="1 of 1 changed rows do not meet it"):
        run(document(3, -1, 15))
    with pytest.raises(errors.GateFailed, match="2 of 2 rows do not meet it"):
        run(document(3, 6, 15))
    assert run(document(3, 7, 16)) == [third[0], {**third[1], "n": 7}]


def test_a_wider_type_without_a_changed_document_is_judged(spark: SparkSession, tmp_path: Path) -> None:
    """A late event may widen a type without becoming its document's row; all rows are then written again with it."""
    suite = (
        '{"table": "cases.things", "expectations": ['
        '{"type": "expect_column_values_to_be_of_type", "kwargs": {"column": "n", "type_": "IntegerType"}}]}'
    )
    settings, layout, log = documents_with(spark, tmp_path, suite)

    def run(n: float, at: int) -> None:
        log.append({"things": [{"op": "u", "key": 1, "at": at, "after": {"_id": 1, "n": n}}]})
        silver.run(spark, settings)
        publish.run(spark, settings)

    run(1, 10)
    with pytest.raises(errors.GateFailed, match="expect_column_values_to_be_of_type of n"):
        run(1.5, 9)
    assert oracle.read(layout.gold("cases", "things").path or "").to_pylist() == [{"_id": 1, "n": 1, "__key": "1"}]


def test_many_changed_rows_are_judged_by_tasks(spark: SparkSession, tmp_path: Path) -> None:
    """The driver would evaluate each condition row by row: of a few megabytes of flags it took a minute."""
    settings, _, log = documents_with(
        spark,
        tmp_path,
        '{"table": "cases.things", "expectations": [{"type": "expect_column_to_exist", "kwargs": {"column": "n"}}]}',
    )
    changed_rows = []

    class Seen(expectations.Gate):
        def __call__(self, session: SparkSession, candidate: Candidate) -> Mapping[str, object]:
            if candidate.changed is not None:
                rows = candidate.changed.where("n >= 0")
                changed_rows.append((rows.count(), "LocalTableScan" in rows._jdf.queryExecution().executedPlan().toString()))
            return super().__call__(session, candidate)

    gate = Seen(settings, expectations.Gate.of(settings).suites)
    for count, at in ((1, 10), (1, 11), (3000, 12)):
        text = "x" * 30
        rows = [{"op": "u", "key": key, "at": at, "after": {"_id": key, "n": key, "text": text}} for key in range(count)]
        log.append({"things": rows})
        silver.run(spark, settings)
        publish.run(spark, settings, audit=gate)
    assert changed_rows == [(1, True), (3000, False)]


MISTAKES = {
    "type": (
        "expect_colum_values_to_be_unique",
        "{column: total}",
        "there is no expectation expect_colum_values_to_be_unique",
    ),
    "kwargs": ("expect_column_values_to_be_between", "{colum: total, min_value: 1}", "expectations[0].kwargs.colum: "),
}


def test_mistakes_in_suites_are_told_before_anything_is_done(spark: SparkSession, tmp_path: Path) -> None:
    """Unknown types, arguments and tables are reported before the run; an unknown column is reported when the table is validated."""
    for name, (type_, kwargs, told) in MISTAKES.items():
        text = f"table: totals\nexpectations:\n  - {{type: {type_}, kwargs: {kwargs}}}\n"
        shop = gold_shop.made(spark, tmp_path, {"totals": TOTALS}, suites={"a.yml": text})
        with pytest.raises(errors.SettingsError) as refused:
            expectations.Gate.of(shop.settings)
        assert told in str(refused.value), name
    text = "table: totls\nexpectations:\n  - {type: expect_table_row_count_to_equal, kwargs: {value: 1}}\n"
    shop = gold_shop.made(spark, tmp_path, {"totals": TOTALS}, suites={"a.yml": text})
    with pytest.raises(errors.SettingsError, match=r"totls is neither a collection nor a model \(did you mean totals\?\)"):
        publish.checked(spark, shop.settings)
    shop = gold_shop.made(
        spark, tmp_path, {"totals": TOTALS}, suites={"a.yml": SUITE.replace("total,", "totl,") + "table: totals\n"}
    )
    shop.change("orders", {"_id": 1, "customer": 1, "amount": 5})
    with pytest.raises(errors.SettingsError, match=r"totals has no column totl \(did you mean total\?\)"):
        publish.run(spark, shop.settings, only_models=True)


def test_the_demo_shows_a_gate_that_refuses(spark: SparkSession, tmp_path: Path) -> None:
    """One model is published; the other never becomes a table, and the demo shows the reason."""
    settings = gold_shop.made(spark, tmp_path, {}).settings
    layout = delta.layout(settings.lakehouse)
    settings = dataclasses.replace(settings, source=dataclasses.replace(settings.source, collection_include_list=()))
    delta.create(spark, layout.gold("shop", "orders"), columns="customer STRING, total DECIMAL(18, 2)")
    spark.sql(f"INSERT INTO {layout.gold('shop', 'orders')} VALUES ('a', 2.5), ('a', 1), ('b', 3)")
    screen = Console(file=io.StringIO(), width=200)
    quality.show(spark, settings, tmp_path / "demo", screen=screen)
    shown = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "free_orders: the new version is not published" in shown and "1 of 2 rows do not meet it" in shown
    assert shown.index("3.50") < shown.index("3.00")
    assert delta.exists(spark, layout.model("customer_totals")) and not delta.exists(spark, layout.model("free_orders"))
