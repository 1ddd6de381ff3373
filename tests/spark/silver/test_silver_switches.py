"""Settings that are changed and changed back: no row returns to an older state, and columns that are not configured any more are null."""

from __future__ import annotations

import logging
import threading
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pipelines.bronze import quarantine_table
from pipelines.operations import quarantine
from pipelines.silver import ranges
from pipelines.silver import run as silver
from tests.harness import bronze_rows, model
from tests.harness.layers import Hop, Row, document, pipeline

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.journey  # minutes on a slow machine

MODE = "delete.tombstone.handling.mode"
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "keeping": ({"keep.document": True}, {"keep.document": False}),
    "kept": ({"keep.document": False}, {"keep.document": True}),
    **{f"{one.name}_{other.name}": ({MODE: one.value}, {MODE: other.value}) for one, other in permutations(model.MODES, 2)},
    "versions": ({"history": True}, {}),
    "numbered": ({"array.encoding": "document"}, {}),
    "pinned": ({"schema": {"w": "double"}}, {"schema": {"w": "string", "n.x": "bigint"}}),
    "typed": ({"schema.on.conflict": "retype"}, {"schema.on.conflict": "rescue"}),
    "added": ({"add.fields": "op,source.ts_ms"}, {}),
    "taken": ({}, {"add.fields": "op", "add.fields.prefix": "", "add.headers": "key,op", "add.headers.prefix": ""}),
    "flat": ({"flatten.struct": True}, {}),
    "deep": ({}, {"flatten.struct": True}),
}
"""The settings of a collection before and after a switch; the third phase has the first settings again."""


def update(key: int, at: int, **fields: Any) -> Row:
    return {"op": "u", "key": key, "at": at, "update": fields}


def delete(key: int, at: int) -> Row:
    return {"op": "d", "key": key, "at": at}


PHASES: list[list[Row]] = [
    [*(document(key, 10 + key, "c", v=1, w=1, n={"x": 1}, a=[1]) for key in (1, 2, 3, 4)), delete(2, 20)],
    [document(1, 30, v=2, w=2, op="here", a=["x"]), document(2, 31, "c", v=2, w=2), delete(3, 32)],
    [document(1, 40, v=3, w=3, n={"x": 3}), document(2, 41, v=3, w=3), document(3, 42, "c", v=3, w=3), delete(4, 43)],
]
PARTIAL = [update(1, 40, v=3), update(2, 41, v=3), document(3, 42, "c", v=3, w=3), delete(4, 43)]
"""The events of the last phase without look-up."""


@pytest.fixture(scope="module")
def switched(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Hop:
    """Each pair of settings has its own collection: the first settings, the second, and the first again."""
    root = tmp_path_factory.mktemp("switched")
    hop = Hop(spark, pipeline(root))
    for phase, events in enumerate(PHASES):
        hop.settings = pipeline(root, {name: pair[phase % 2] for name, pair in PAIRS.items()})
        given = {name: PARTIAL if name == "keeping" and phase == 2 else events for name in PAIRS}
        hop.bronze.append(given)
        hop.silver()
        if phase != 1:
            hop.gold()
    return hop


@pytest.mark.parametrize("name", [name for name in PAIRS if name != "keeping"])
def test_settings_are_switched_and_switched_back(switched: Hop, name: str) -> None:
    """Documents that were inserted again are there with their latest values. A delete is applied as configured when it arrived."""
    found = {row["_id"]: (row["v"], row["w"]) for row in switched.documents(name)}
    kept = {4: (1, 1)} if PAIRS[name][0].get(MODE) == "drop" else {}
    assert found == {1: (3, 3), 2: (3, 3), 3: (3, 3)} | kept
    assert not any(row.get("__deleted") for row in switched.rows(name) if row["_id"] != 4)


def test_a_history_goes_on_where_it_was_left(switched: Hop) -> None:
    """Versions from the time without a history are added when it is switched on again."""
    table = switched.layout.history(bronze_rows.DB, "versions")
    rows = switched.spark.table(str(table)).orderBy("`__sequence`").selectExpr("_id", "v", "`__until` IS NULL").collect()
    assert [row.v for row in rows if row[0] == 1] == [1, 2, 3]
    assert sorted((row[0], row.v) for row in rows if row[2]) == [(1, 3), (2, 3), (3, 3)]


def test_partial_updates_do_not_go_back_to_a_document_of_before(switched: Hop) -> None:
    """A document that was written without its whole text is not used as a base: its row stays and is incomplete."""
    found = {row["_id"]: (row["v"], row["w"], row.get("__incomplete", False)) for row in switched.rows("keeping")}
    assert found == {1: (2, 2, True), 2: (2, 2, True), 3: (3, 3, False)}


def test_columns_that_nobody_asks_for_any_more_hold_nothing(switched: Hop) -> None:
    """A column with the name of a document's field belongs to the document; an `add.fields` column that was switched off is null in
    written rows.
    """
    assert all(row["__op"] in ("c", "u") for row in switched.documents("added"))
    rows = {row["_id"]: row for row in switched.documents("taken")}
    assert {"op", "key", "op_2"} & rows[1].keys() == set(), "of the second settings alone, and the last document has no op"


def test_the_switch_to_partial_updates_is_told(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """When partial updates begin, collections with rows without whole documents are named once. A run that is stopped between two ranges
    keeps the drop.
    """
    hop = Hop(spark, pipeline(tmp_path, **{"max.batch.events": 2}))
    hop.bronze.append({"orders": [document(key, 10 + key, "c", v=1) for key in (1, 2)]})
    hop.silver()
    hop.bronze.append({"orders": [{"drop": 20}, document(3, 30, "c", v=2), document(4, 31, "c", v=2)]})
    hop.bronze.append({"orders": [document(5, 40, "c", v=2), document(6, 41, "c", v=2)]})
    stop = threading.Event()
    with_sweeps = ranges._with_sweeps

    def one(*args: Any) -> Any:
        stop.set()
        return with_sweeps(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranges, "_with_sweeps", one)
        silver.run(spark, hop.settings, stop=stop)
    assert len(hop.rows("orders")) == 2
    hop.settings = pipeline(tmp_path, **{"keep.document": True})
    with caplog.at_level(logging.WARNING):
        hop.silver()
        hop.bronze.append({"orders": [document(7, 50, "c", v=2)]})
        hop.silver()
    assert [row["_id"] for row in hop.rows("orders")] == [3, 4, 5, 6, 7]
    assert [each.getMessage().split(":")[0] for each in caplog.records] == ["cases.orders"]


def test_a_sweep_spares_what_waits_in_quarantine(spark: SparkSession, tmp_path: Path) -> None:
    """A snapshot row that is unreadable shows that its document exists; the corrected event replaces it."""
    hop = Hop(spark, pipeline(tmp_path, {"dropping": {MODE: "drop"}}))
    nameless = [document(1, 10, "c"), delete(1, 11), {"op": None, "key": 2, "at": 12, "after": {"_id": 2}}]
    hop.bronze.append({"orders": [document(key, 10 + key, "c", v=1) for key in (1, 2, 3)], "dropping": nameless})
    read = [{"op": "r", "key": 1, "at": 20, "text": '{"_id":1,'}, document(2, 20, "r", v=2)]
    hop.bronze.append({"orders": [*read, {"sweep": 20}]})
    hop.silver()
    assert [(row["_id"], row["v"], row.get("__incomplete", False)) for row in hop.rows("orders")] == [
        (1, 1, True),
        (2, 2, False),
    ]
    assert quarantine_table.count(spark, hop.layout.quarantine(bronze_rows.DB, "dropping")) == 1, (
        "of no known operation, where deletes do nothing"
    )
    [held] = quarantine.listed(spark, hop.layout.quarantine(bronze_rows.DB, "orders"))
    quarantine.replay(
        spark,
        hop.layout,
        name=hop.settings.name,
        namespace=(bronze_rows.DB, "orders"),
        corrections={held.resume_token: {"after": '{"_id":1,"v":2}'}},
        now_ms=5,
    )
    hop.silver()
    assert [(row["_id"], row["v"], row.get("__incomplete", False)) for row in hop.rows("orders")] == [
        (1, 2, False),
        (2, 2, False),
    ]
