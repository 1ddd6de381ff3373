"""History tables: the documents as they were at each second of the source."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from cdc_core import errors
from cdc_core.properties.unwrap import DeleteMode
from pipelines.delta.writer import Writer
from pipelines.gold import in_process_history
from pipelines.silver import ranges
from pipelines.silver.collection import CollectionWork, SilverCollection
from tests.harness import bronze_rows, histories, model, oracle
from tests.harness.histories import History, Mode
from tests.harness.history_tables import ENDS, ENGINE, HistoryHop, change

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


APPLIED = in_process_history.InProcess.is_applied


@pytest.fixture(params=["queries"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Versions are computed by Spark queries (`queries`), as for tables that this process does not see, or in this process if possible
    (`process`).
    """
    if request.param == "queries":
        monkeypatch.setattr(in_process_history.InProcess, "is_applied", lambda *_: False)
    return str(request.param)


BY_QUERIES = pytest.mark.parametrize("way", ["queries", pytest.param("process", marks=pytest.mark.journey)], indirect=True)
"""Tests of this process without Spark are in `tests/unit/gold/test_in_process_history.py`, also of the work that it leaves to queries."""


@pytest.fixture
def silver_moves_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silver's position moves to bronze's newest batch, and no event is applied. Versions are computed from bronze's events; silver's
    queries for late and unreadable events take as long, and have their own tests.
    """

    def moved(collection: SilverCollection, work: CollectionWork, **_: Any) -> ranges.Progress:
        position = dataclasses.replace(ranges._under_these_settings(collection, work), to=work.to)
        collection.move(position)
        return ranges.Progress(position, work.counts.events)

    monkeypatch.setattr(ranges, "apply", moved)


@contextlib.contextmanager
def by_this_process() -> Iterator[None]:
    """Compute a test's first versions without queries, whichever way it tests: the result is the same, and queries take seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_process_history.InProcess, "is_applied", APPLIED)
        yield


def test_what_a_delete_does_to_a_version(spark: SparkSession, lakehouse: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the version, except with `drop`; the `rewrite` modes also mark it as deleted. A second run changes nothing."""
    by_queries = (DeleteMode.DROP.value, DeleteMode.REWRITE.value)

    def is_applied(local: in_process_history.InProcess, kept: Any, *given: Any) -> bool:
        return kept.namespace.collection not in by_queries and APPLIED(local, kept, *given)

    monkeypatch.setattr(in_process_history.InProcess, "is_applied", is_applied)
    hop = HistoryHop(spark, lakehouse, {mode.value: {"delete.tombstone.handling.mode": mode.value} for mode in model.MODES})
    events = [
        change("c", 1, 10, "a"),
        change("u", 1, 20, "b"),
        change("d", 1, 30),
        change("c", 1, 40, "c"),
        change("c", 2, 15, "x"),
    ]
    names = [mode.value for mode in model.MODES]
    hop.bronze.append(dict.fromkeys(names, events))
    first = hop.run()
    assert sum("(history)" in each.namespace for each in first.collections) == len(names)
    for name in names:
        is_drop = name == DeleteMode.DROP.value
        assert [hop.at(name, second).get(1) for second in (9, 10, 19, 20, 29)] == [None, "a", "a", "b", "b"]
        assert hop.at(name, 35) == ({1: "b", 2: "x"} if is_drop else {2: "x"})
        assert hop.at(name, 99) == {1: "c", 2: "x"}
        marked = [row["v"] for row in hop.versions(name) if row.get("__deleted")]
        assert marked == (["b"] if name.startswith("rewrite") else [])
        columns = spark.table(hop.table(name)).columns
        assert columns[-len(ENDS) :] == ENDS or not name.startswith("rewrite")
    assert hop.run().collections == ()


@pytest.mark.usefixtures("silver_moves_on")
def test_what_a_late_event_and_a_sweep_say_of_deletes_when_the_mode_is_gone(spark: SparkSession, lakehouse: Path) -> None:
    """The column stays and remains correct, both for a version that an earlier delete ended and for versions that end later."""
    hop = HistoryHop(spark, lakehouse, {"things": {"delete.tombstone.handling.mode": "rewrite"}})
    hop.bronze.append({"things": [change("c", 1, 10, "a"), change("d", 1, 20), change("c", 2, 11, "x")]})
    with by_this_process():
        hop.run()
    later = HistoryHop(spark, lakehouse, {"things": {}})
    hop.bronze.append({"things": [change("u", 1, 15, "b"), {"drop": 30}]})
    later.run()
    ends = [(row["v"], row["__deleted"]) for row in later.versions("things")]
    assert ends == [("a", False), ("x", True), ("b", True)]


@BY_QUERIES
def test_what_a_drop_and_a_late_event_say_of_deletes_when_the_mode_is_young(spark: SparkSession, lakehouse: Path) -> None:
    """Older rows have null. A drop adds the column if it is missing, in silver, too; versions with null are not known to be deleted."""
    hop = HistoryHop(spark, lakehouse, {})
    events = [change("c", 1, 10, "a"), change("c", 2, 11, "x"), change("d", 2, 15)]
    hop.bronze.append({"dropped": events, "late": events})
    with by_this_process():
        hop.run()
    rewrite = {"delete.tombstone.handling.mode": "rewrite"}
    later = HistoryHop(spark, lakehouse, {"dropped": rewrite, "late": rewrite})
    hop.bronze.append({"dropped": [{"drop": 30}], "late": [change("c", 3, 20, "b")]})
    later.run()
    silver = spark.table(str(hop.layout.silver(bronze_rows.DB, "dropped"))).select("_id", "`__deleted`")
    assert [tuple(row) for row in silver.collect()] == [(1, True)]
    assert [(row["v"], row["__deleted"]) for row in later.versions("dropped")] == [("a", True), ("x", None)]
    assert spark.table(hop.table("dropped")).columns[-len(ENDS) :] == ENDS
    hop.bronze.append({"late": [change("u", 2, 13, "y")]})
    later.run()
    ends = [(row["v"], row["__deleted"]) for row in later.versions("late")]
    assert ends == [("a", None), ("x", False), ("y", False), ("b", False)]


@BY_QUERIES
def test_a_column_that_somebody_dropped_is_for_a_person(spark: SparkSession, lakehouse: Path) -> None:
    """If it was added again, it would be null in all existing versions; its values are in bronze."""
    hop = HistoryHop(spark, lakehouse, {"things": {}})
    hop.bronze.append({"things": [change("c", 1, 10, "a"), change("c", 2, 11, "b")]})
    with by_this_process():
        hop.run()
    spark.sql(f"ALTER TABLE {hop.table('things')} SET TBLPROPERTIES ('delta.columnMapping.mode' = 'name')")
    spark.sql(f"ALTER TABLE {hop.table('things')} DROP COLUMN v")
    hop.bronze.append({"things": [change("u", 1, 20, "c")]})
    with pytest.raises(errors.DecisionNeeded, match=r"\(v\), dropped or renamed"):
        hop.run()
    shutil.rmtree(hop.layout.history(bronze_rows.DB, "things").path or "")
    hop.run()
    assert hop.at("things", 15) == {1: "a", 2: "b"} and hop.at("things", 20) == {1: "c", 2: "b"}


@pytest.mark.usefixtures("silver_moves_on")
def test_an_update_that_comes_again_changes_nothing(spark: SparkSession, lakehouse: Path) -> None:
    """A repeated range finds the version before its first event, and ends it where that event begins."""
    hop = HistoryHop(spark, lakehouse, {"things": {"keep.document": True}})
    update = {"op": "u", "key": 1, "at": 20, "update": {"w": 2}}
    hop.bronze.append({"things": [change("c", 1, 10, "a"), update]})
    with by_this_process():
        hop.run()
    hop.bronze.append({"things": [update]})
    hop.run()
    assert (hop.at("things", 10), hop.at("things", 20)) == ({1: "a"}, {1: "a"})
    assert not any(row["__incomplete"] for row in hop.versions("things"))


@pytest.mark.journey
def test_the_updates_that_a_late_document_needs_are_looked_for_behind_it(
    spark: SparkSession, lakehouse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bronze skips older files. While a first snapshot runs each range may contain such documents, and previously all of bronze was read
    each time.
    """
    hop = HistoryHop(spark, lakehouse, {"things": {"keep.document": True}})
    hop.bronze.append({"things": [{"op": "u", "key": 1, "at": 20, "update": {"w": 2}}, change("c", 2, 30, "x")]})
    hop.run()
    plans = []

    def seen(*given: Any) -> Any:
        found = awaited(*given)
        plans.append(found._jdf.queryExecution().optimizedPlan().toString())
        return found

    kept = in_process_history.History
    awaited = kept._with_awaited
    monkeypatch.setattr(kept, "_with_awaited", seen)
    hop.bronze.append({"things": [change("r", 1, 10, "a")]})
    hop.run()
    assert [row["w"] for row in hop.versions("things")] == [None, 2, None]
    assert "sequence#" in plans[0] and f"> {bronze_rows.sequence(10, is_snapshot=True)}" in plans[0]


@pytest.mark.journey
def test_what_came_while_nothing_was_folded_is_not_missing_later(spark: SparkSession, lakehouse: Path) -> None:
    """`keep.document` is switched off and on again: partial updates in between are incomplete, and whole documents are not stored for
    later ones.
    """
    hop = HistoryHop(spark, lakehouse, {"things": {"keep.document": True}})
    hop.bronze.append({"things": [change("c", 1, 10, "a"), change("c", 2, 10, "x")]})
    hop.run()
    without = HistoryHop(spark, lakehouse, {"things": {}})
    hop.bronze.append({"things": [{"op": "u", "key": 1, "at": 20, "update": {"v": "b"}}, change("u", 2, 20, "z")]})
    without.run()
    hop.bronze.append({"things": [{"op": "u", "key": key, "at": 30, "update": {"w": 1}} for key in (1, 2)]})
    hop.run()
    assert [hop.at("things", second) for second in (10, 20, 30)] == [{1: "a", 2: "x"}, {1: "b", 2: "z"}, {1: "b", 2: "z"}]
    assert not any(row["__incomplete"] for row in hop.versions("things"))


def test_a_column_of_add_fields_is_no_documents_later(spark: SparkSession, lakehouse: Path) -> None:
    """Its name stays reserved after the setting is removed: a document's field with that name gets another column.

    A history table that was removed is created again with the current settings.
    """
    hop = HistoryHop(spark, lakehouse, {"things": {"add.fields": "op", "add.fields.prefix": ""}})
    hop.bronze.append({"things": [change("c", 1, 10, "a")]})
    with by_this_process():
        hop.run()
    later = HistoryHop(spark, lakehouse, {"things": {}})
    hop.bronze.append({"things": [{"op": "u", "key": 1, "at": 20, "after": {"_id": 1, "v": "b", "op": 5, "n": {"x": 1}}}]})
    later.run()
    assert [(row["op"], row["op_2"]) for row in hop.versions("things")] == [("c", None), (None, 5)]
    shutil.rmtree(hop.table("things").split("`")[1])
    HistoryHop(spark, lakehouse, {"things": {"flatten.struct": True}}).run()
    assert [(row["v"], row["op"], row["n_x"]) for row in hop.versions("things")] == [("a", None, None), ("b", 5, 1)]


@pytest.mark.parametrize("way", ["queries", "process"], indirect=True)
def test_a_column_of_add_fields_keeps_its_letters(spark: SparkSession, lakehouse: Path) -> None:
    """If the setting changes the case of its name, and changes back, the existing column is used: Delta allows no two columns whose names
    differ only in case.
    """
    hop = HistoryHop(spark, lakehouse, {"things": {"add.fields": "op"}})
    hop.bronze.append({"things": [change("c", 1, 10, "a")]})
    with by_this_process():
        hop.run()
    for at, name in ((20, "op:OP"), (30, "op")):
        hop.bronze.append({"things": [change("u", 1, at, "b")]})
        HistoryHop(spark, lakehouse, {"things": {"add.fields": name}}).run()
    documents = oracle.rows(oracle.read(hop.layout.gold("cases", "things").path or ""), by="__key")
    assert [row["__op"] for row in (*hop.versions("things"), *documents)] == ["c", "u", "u", "u"]


@pytest.mark.usefixtures("silver_moves_on")
@BY_QUERIES
def test_what_cannot_be_read_leaves_versions_incomplete(spark: SparkSession, lakehouse: Path) -> None:
    """From an unreadable update on, versions are incomplete until the update is captured again in readable form."""
    hop = HistoryHop(spark, lakehouse, {"things": {"keep.document": True}})
    after = {"op": "u", "key": 1, "at": 30, "update": {"w": 3}}
    hop.bronze.append({"things": [change("c", 1, 10, "a"), {"op": "u", "key": 1, "at": 20, "update": "{"}, after]})
    hop.run()
    assert shown(hop) == [("a", False), ("a", True), ("a", True)]
    hop.bronze.append({"things": [{"op": "u", "key": 1, "at": 20, "update": {"v": "b"}}, after]})
    hop.run()
    assert shown(hop) == [("a", False), ("b", False), ("b", False)]


@pytest.mark.usefixtures("silver_moves_on")
@BY_QUERIES
def test_an_update_whose_document_is_not_known_ends_what_was_there(spark: SparkSession, lakehouse: Path) -> None:
    """The look-up found no document or an unreadable one, and documents are not stored: no wrong version is shown as valid."""
    hop = HistoryHop(spark, lakehouse, {"things": {}})
    late = {"op": "u", "key": 1, "at": 20, "update": {"w": 5}}
    hop.bronze.append({"things": [change("c", 1, 10, "a"), late]})
    hop.run()
    assert [(row["v"], row["w"], row["__incomplete"]) for row in hop.versions("things")] == [
        ("a", None, False),
        (None, 5, True),
    ]
    hop.bronze.append({"things": [change("u", 1, 30, "b"), {"op": "u", "key": 1, "at": 40, "text": "{"}]})
    hop.run()
    assert shown(hop) == [("a", False), (None, True), ("b", False), (None, True)]
    assert [hop.at("things", second) for second in (10, 30)] == [{1: "a"}, {1: "b"}]


def shown(hop: HistoryHop) -> list[tuple[Any, ...]]:
    """Value and incompleteness of each version, in order."""
    return [(row["v"], row["__incomplete"]) for row in hop.versions("things")]


def test_a_looked_up_document_is_marked_where_documents_are_kept(spark: SparkSession, lakehouse: Path) -> None:
    """`keep.document` only folds events without a document; a looked-up document stays as it was captured. The first versions need no
    MERGE.
    """
    hop = HistoryHop(spark, lakehouse, {"things": {"keep.document": True}})
    partial = {"op": "u", "key": 1, "at": 30, "update": {"v": "c"}}
    hop.bronze.append({"things": [change("c", 1, 10, "a"), {**change("u", 1, 20, "b"), "update": {"v": "b"}}, partial]})
    hop.run()
    assert [row["v"] for row in hop.versions("things") if row["__as_captured"]] == ["b"]
    log = Path(hop.layout.history(bronze_rows.DB, "things").path or "", "_delta_log")
    commits = [commit.read_text() for commit in log.glob("*.json")]
    assert commits and not any('"operation":"MERGE"' in commit for commit in commits)


@pytest.mark.journey
@pytest.mark.parametrize("way", ["queries", "process"], indirect=True)
def test_late_events_drops_and_wider_types(spark: SparkSession, lakehouse: Path) -> None:
    """A late version is inserted between others. A drop ends all versions permanently. A widened column is rewritten, so that gold keeps
    plain types.
    """
    hop = HistoryHop(spark, lakehouse, {"things": {}})
    hop.bronze.append({"things": [change("c", 1, 10, 1), change("u", 1, 30, 3), change("c", 2, 12, 7)]})
    hop.run()
    hop.bronze.append({"things": [change("u", 1, 20, 2.5), change("d", 3, 25)]})
    hop.run()
    assert [hop.at("things", second)[1] for second in (10, 20, 30)] == [1.0, 2.5, 3.0]
    hop.bronze.append({"things": [{"drop": 50}, change("r", 3, 22, 9), change("u", 2, 45, 8), change("c", 2, 60, 9)]})
    hop.run()
    assert hop.at("things", 23)[3] == 9 and 3 not in hop.at("things", 25)
    assert (hop.at("things", 49), hop.at("things", 50), hop.at("things", 60)) == ({1: 3.0, 2: 8.0}, {}, {2: 9.0})
    table = hop.spark.table(hop.table("things"))
    assert dict(table.dtypes)["v"] == "double" and table.where("v IS NULL AND valid_from <> valid_to").isEmpty()
    details = hop.spark.sql(f"DESCRIBE DETAIL {hop.table('things')}").first()
    assert not {"columnMapping", "typeWidening"} & set(details.tableFeatures or ())


@pytest.mark.journey
def test_a_history_can_be_switched_on_later(spark: SparkSession, lakehouse: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A history begins with bronze's first batch whenever it is switched on. A killed run is repeated. Looked-up documents are marked."""
    hop = HistoryHop(spark, lakehouse, {"things": {"history": False}})
    hop.bronze.append({"things": [change("c", 1, 10, "a")]})
    hop.run()
    later = HistoryHop(spark, lakehouse, {"things": {"max.batch.events": 2}})
    later.bronze = hop.bronze
    looked_up = {**change("u", 1, 20, "b"), "update": {"v": "b"}}
    hop.bronze.append({"things": [looked_up, change("u", 1, 30, "c"), change("c", 2, 30, "x")]}, batches=3)

    class Killed(BaseException):
        pass

    def killing(name: str) -> Any:
        commit = getattr(Writer, name)

        def killed(writer: Writer, *given: Any, **named: Any) -> Any:
            version = commit(writer, *given, **named)
            if "_history" in str(writer.table) and version is not None:
                raise Killed
            return version

        return killed

    with monkeypatch.context() as dying:
        for name in ("merge", "upsert"):
            dying.setattr(Writer, name, killing(name))
        with pytest.raises(Killed):
            later.run()
    later.run()
    assert [later.at("things", second).get(1) for second in (10, 20, 30)] == ["a", "b", "c"]
    captured = spark.table(later.table("things")).where("`__as_captured`").select("v").collect()
    assert [row.v for row in captured] == ["b"]
    hop.bronze.append({"things_history": [change("c", 1, 40, "y")]})
    with pytest.raises(errors.DecisionNeeded, match="things_history"):
        later.run()


CASES = (
    model.Case(Mode.DESCRIBED, DeleteMode.TOMBSTONE),
    model.Case(Mode.DESCRIBED, DeleteMode.REWRITE, has_pre_images=True),
    model.Case(Mode.WHOLE, DeleteMode.REWRITE_WITH_TOMBSTONE),
)


@pytest.mark.journey
@pytest.mark.parametrize("way", ["queries", "process"], indirect=True)
def test_any_histories(spark: SparkSession, lakehouse: Path) -> None:
    """Every version of every document at its second, with partial updates, with whole documents, and with pre-images."""
    drawn = histories.drawn(200, seed=5)
    hop = HistoryHop(spark, lakehouse, {case.name: case.options for case in CASES})
    landed = {case: model.landing(drawn, case) for case in CASES}
    for batch in range(histories.BATCHES):
        hop.bronze.append({case.name: landed[case][batch] for case in CASES})
        hop.run()
    for case in CASES:
        table = spark.table(hop.table(case.name)).toArrow()
        for step in range(max(len(history.versions) for history in drawn)):
            assert faults(table, drawn, case, step) == [], case.name


def faults(table: pa.Table, drawn: Sequence[History], case: model.Case, step: int) -> list[str]:
    """Differences between the versions that are valid at a step of each history and the documents at that step."""
    began = [int(second.timestamp()) for second in table["valid_from"].to_pylist()]
    ended = [None if second is None else int(second.timestamp()) for second in table["valid_to"].to_pylist()]
    numbers = [int(key) for key in table["__key"].to_pylist()]
    at = [1 + number * model.SECONDS + step for number in numbers]
    holds = [start <= now and (end is None or end > now) for start, end, now in zip(began, ended, at, strict=True)]
    expected = {number: history.versions[step] for number, history in enumerate(drawn) if step < len(history.versions)}
    known = {number for number in expected if is_known(drawn[number], case, step)}
    held = chosen(table, (is_held and number in expected for is_held, number in zip(holds, numbers, strict=True)))
    gone = [str(number) for number in known if expected[number] is None]
    found = [f"{key} at {step}: there is a version of it" for key in held["__key"].to_pylist() if key in gone]
    alive = {number for number in known if expected[number] is not None}
    judged = chosen(held, (int(key) in alive for key in held["__key"].to_pylist()))
    found += [f"{key} at {step}: incomplete" for key in judged.filter(judged["__incomplete"])["__key"].to_pylist()]
    values = [oracle.read_bson(histories.raw(expected[number], number)) for number in sorted(alive)]
    differences = oracle.differences(values, judged, added=[name for name in ENGINE if name in table.column_names])
    return found + [f"at {step}: {each}: {drawn[int(each.split(':')[0])]}" for each in differences]


def chosen(table: pa.Table, are_chosen: Iterable[bool]) -> pa.Table:
    return table.filter(pa.array(are_chosen, pa.bool_()))


def is_known(history: History, case: model.Case, step: int) -> bool:
    """Whether the events determine the document at a step."""
    if history.versions[step] is None:
        return step > 0  # no event mentions a document that did not exist before its first event
    if step > 0 and (case.mode is Mode.WHOLE or case.has_pre_images):
        return True
    begun = step
    while begun > 0 and history.versions[begun - 1] is not None:
        begun -= 1
    return begun > 0 or (
        history.snapshot is not None and history.snapshot <= step and history.versions[history.snapshot] is not None
    )
