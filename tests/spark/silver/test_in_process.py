"""Batches that this process applies and publishes give the same result as with Spark, for any changes in small batches."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from cdc_core.bronze import columns as bronze
from cdc_core.properties import unwrap as unwrap_options
from cdc_core.properties.unwrap import DeleteMode, UnwrapOptions
from cdc_core.silver import reduce
from pipelines.bronze import collection_events
from pipelines.delta import live_files, maintenance, table_history
from pipelines.delta import tables as delta
from pipelines.delta.writer import Writer
from pipelines.gold import in_process as gold_small_batch
from pipelines.schema import batch_evolution, looks
from pipelines.silver import in_process, in_process_fold
from tests.harness import bronze_rows, oracle
from tests.harness.layers import Hop, killed_at, pipeline, rows_by_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BATCHES = 3
"""The number in the suite; journeys have more. Tests without Spark generate thousands: `tests/unit/silver/test_in_process.py`."""

VALUES: list[Any] = [
    None, True, 5, -(2**31), 2**53 + 1, 1.5, 1e300, "", "é\U0001f600", "${env:HOME}", "x" * 40, [], {}, [1, "a"], [{"p": 1}, {"p": "x"}],
    {"$numberLong": "9223372036854775807"}, {"$numberDouble": "NaN"}, {"$numberDecimal": "1.50"}, {"$oid": "64b7f0000000000000000001"},
    {"$date": {"$numberLong": "-62135596800001"}}, {"$date": {"$numberLong": "253402300800000"}}, {"$date": {"$numberLong": "1700000000123"}},
    {"$binary": {"base64": "AQI=", "subType": "80"}}, {"$regularExpression": {"pattern": "^a", "options": "i"}}, {"$minKey": 1},
    {"b": {"c": [1.5]}, "d": None},
]  # fmt: skip

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "late": {"add.fields": "op,source.ts_ms"},
    "everything": {
        "delete.tombstone.handling.mode": "rewrite",
        "keep.document": True,
        "add.fields": "op,source.ts_ms,ts_ms,after,nothing.there,source,updateDescription",
        "add.headers": "op",
    },
    "removed": {"keep.document": True, "add.fields": "op,source.ts_ms,ts_ms,after,nothing.there"},
    "flat": {"flatten.struct": True, "array.encoding": "document"},
    "kept": {"delete.tombstone.handling.mode": "tombstone"},
    "marked": {"delete.tombstone.handling.mode": "rewrite"},
    "shown": {"delete.tombstone.handling.mode": "rewrite", "add.fields": "op,source.ts_ms,ts_ms,after,nothing.there"},
    "without_vectors": {},
}


BAD: list[dict[str, Any]] = [
    {"text": "{'a':1}"},
    {"text": '{"a":tru}'},
    {"update": "{'a':1}"},
    {"before": "{"},
    {"op": "x"},
    {"op": "c"},
]
"""What makes an event unreadable, or its pre-image."""


def changes(
    draws: random.Random, batches: int, *, has_partial: bool = False, has_bad: bool = False
) -> Iterator[list[dict[str, Any]]]:
    """Batches of events in order: documents of any shape whose fields are added, removed and change their types, and deletes. With
    `has_partial` also updates without documents, of known and unknown documents, some of them repeated; with `has_bad` also events that
    cannot be read.
    """
    at = 10
    kinds = {name: draws.sample(VALUES, 2) for name in "abcdefg"}
    again: list[dict[str, Any]] = []
    for batch in range(batches):
        events = again if again and draws.random() < 0.5 else []
        # The first batch is a snapshot's: all of its rows have the same sequence.
        for _ in range(draws.randrange(1, 12)):
            at += 1
            key, op = draws.randrange(9), draws.choice("ccuuud")
            fields = draws.sample("abcdefg", draws.randrange(3 + batch // 3))
            after = {"_id": key, **{name: draws.choice(kinds[name]) for name in fields}}
            if batch == 0:
                events.append({"op": "r", "key": len(events), "at": 10, "after": {**after, "_id": len(events)}})
            elif has_partial and op == "u":
                events.append({"op": op, "key": key, "at": at, **change(draws, kinds)})
            elif op == "d":
                events.append({"op": op, "key": key, "at": at, **({"before": after} if draws.random() < 0.3 else {})})
            else:
                events.append({"op": op, "key": key, "at": at, "after": after})
            if has_bad and batch and draws.random() < 0.2:
                events[-1] |= draws.choice(BAD)
        again = events[-1:]
        yield events
    if again:
        yield again


def delayed(batches: Iterable[list[dict[str, Any]]], draws: random.Random) -> Iterator[list[dict[str, Any]]]:
    """The batches, of which a third of the events come in one of the next batches."""
    waiting: list[dict[str, Any]] = []
    for events in batches:
        late = {id(each) for each in [*waiting, *events] if draws.random() < 0.3}
        found, waiting = [each for each in [*waiting, *events] if id(each) not in late], [*waiting, *events]
        waiting = [each for each in waiting if id(each) in late]
        yield found
    yield waiting


def change(draws: random.Random, kinds: dict[str, list[Any]]) -> dict[str, Any]:
    """An update's description: paths that lead into documents and arrays, or nowhere, or that may be names with dots."""
    fields = {name: draws.choice(kinds[name]) for name in draws.sample("abcdefg", draws.randrange(3))}
    fields |= {
        f"{draws.choice('abcdefg')}.{draws.choice('0b13')}": draws.choice([1, "x"]) for _ in range(draws.randrange(2))
    }
    said: dict[str, Any] = {"update": fields, "removed": draws.sample(["a", "b", "c.p", "g.b.c"], draws.randrange(2))}
    said["truncated"] = [{"field": draws.choice("abcdefg"), "size": 1}] if draws.random() < 0.3 else []
    named = {path: path.split(".") for path in fields if "." in path}
    return said | ({"disambiguated": named} if draws.random() < 0.3 else {})


def content(hop: Hop, kind: str) -> tuple[dict[str, str], list[str]]:
    """Types and rows of one of a collection's tables, read without a query; empty if there is no such table."""
    table = getattr(hop.layout, kind)(bronze_rows.DB, "t")
    if not delta.exists(hop.spark, table):
        return {}, []
    types = {each.name: each.dataType.simpleString() for each in hop.spark.table(str(table)).schema}
    live = live_files.LiveFiles(Path(table.path or ""))
    assert live.move_to(table_history.version(hop.spark, table))
    rows = [*map(_row, live.rows(live.files()).to_pylist())]
    # A fact is stored a second time where Spark continues after this process has stored it (`deletes.remembered`).
    return types, sorted(set(rows) if kind in ("deletes", "quarantine") else rows)


def _row(row: dict[str, Any]) -> str:
    """A row as text; maps, which Arrow returns as pairs, are sorted."""
    return json.dumps({**row, "__rescued": sorted(row.get("__rescued") or ())}, sort_keys=True, default=str)


@pytest.fixture
def by_process(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many batches this process applied and published."""
    counts = {"silver": 0, "gold": 0}

    def counting(layer: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def acted(*given: Any, **named: Any) -> Any:
            result = act(*given, **named)
            counts[layer] += result not in (False, None)
            return result

        return acted

    monkeypatch.setattr(in_process, "applied", counting("silver", in_process.applied))
    for name in ("loaded", "merged"):
        monkeypatch.setattr(gold_small_batch, name, counting("gold", getattr(gold_small_batch, name)))
    return counts


@pytest.mark.parametrize(
    ("name", "count"),
    [("everything", BATCHES), *(pytest.param(name, 7, marks=pytest.mark.journey) for name in SETTINGS)],
)
def test_both_ways_give_the_same(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_process: dict[str, int], name: str, count: int
) -> None:
    """Rows, types, remembered deletes and schemas are compared after every few batches, with dates as Arrow values, because Python has no
    far dates.
    """
    ways = [Hop(spark, pipeline(tmp_path / way, **SETTINGS[name])) for way in ("few", "steps")]
    if name == "without_vectors":
        for hop in ways:
            hop.settings = replace(hop.settings, gold=replace(hop.settings.gold, deletion_vectors=False))
    has_partial = name not in ("plain", "late", "flat", "without_vectors")
    batches = list(changes(random.Random(name), count, has_partial=has_partial, has_bad=name != "late"))
    if name == "late":
        batches = [*delayed(batches, random.Random(1))]
    if SETTINGS[name].get("keep.document"):  # a new field is seen at its first event, not at the last one of a document
        batches[-1] = [*batches[-1], *({"op": "u", "key": 0, "at": at, "update": {"late": at}} for at in (10_001, 10_002))]
    for number, events in enumerate(batches):
        for hop in ways:
            hop.bronze.append({"t": events})
            with monkeypatch.context() as patch:
                patch.setattr(live_files, "PART_ROWS", 3)
                if hop is ways[1]:
                    patch.setattr(collection_events, "LOCAL_EVENTS", -1)
                    patch.setattr(gold_small_batch.SourceFiles, "of", lambda *tables: None)
                hop.run()
        if number % 3 == 1 or number == len(batches) - 1:
            for kind in ("silver", "gold", "deletes", "quarantine"):
                (types, rows), (expected_types, expected) = (content(hop, kind) for hop in ways)
                assert types == expected_types, (kind, number)
                assert [pair for pair in zip(rows, expected, strict=True) if pair[0] != pair[1]] == [], (kind, number)
    noted = [oracle.read(hop.layout.ops("schemas").path or "") for hop in ways]
    schemas = [
        each.sort_by([(name, "ascending") for name in ("version", "path")]).drop("batch").to_pylist() for each in noted
    ]
    assert schemas[0] == schemas[1]
    # Widened types, and updates that only mark an unknown document, are left to Spark.
    assert by_process["silver"] >= (3 if name in ("marked", "kept", "shown", "everything") else count - 1)
    assert by_process["gold"] >= 3


@pytest.mark.parametrize("names", [150, 1100], ids=["struct", "map"])
def test_names_that_may_be_data_give_the_same_first_schema(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_process: dict[str, int], names: int
) -> None:
    """The first documents do not tell whether a nested document is used as a map: all of the batch do, in this process as in Spark."""
    monkeypatch.setattr(looks, "BEGINNING", 20)
    draws = random.Random(names)

    def attributes() -> dict[str, Any]:
        kinds = (1, 2.5, "a")
        return {f"a{number}": kinds[number % 3] for number in sorted(draws.sample(range(names), 100))}

    documents = [{"_id": key, "attributes": attributes(), "n": key} for key in range(60)]
    ways = [Hop(spark, pipeline(tmp_path / way)) for way in ("few", "steps")]
    for hop in ways:
        hop.bronze.append(
            {"t": [{"op": "c", "key": each["_id"], "at": 10 + each["_id"], "after": each} for each in documents]}
        )
        with monkeypatch.context() as patch:
            if hop is ways[1]:
                patch.setattr(collection_events, "LOCAL_EVENTS", -1)
            hop.silver()
    (types, rows), (expected_types, expected) = (content(hop, "silver") for hop in ways)
    assert types == expected_types and rows == expected
    assert types["attributes"].startswith("map<" if names > 1000 else "struct<")
    noted = [oracle.read(hop.layout.ops("schemas").path or "").drop("batch").to_pylist() for hop in ways]
    assert noted[0] == noted[1] and by_process["silver"] == 1


@pytest.mark.parametrize("mode", [DeleteMode.TOMBSTONE, DeleteMode.REWRITE])
def test_events_without_documents_mark_what_sql_marks(spark: SparkSession, mode: DeleteMode) -> None:
    """For any documents, updates without documents, and deletes of a key, the written row equals that of the reduction by Spark."""
    draws = random.Random(1)
    drawn = {
        f"{key:03}": draws.choice("cu") + "".join(draws.choices("cudb", [3, 4, 1, 1], k=draws.randrange(5)))
        for key in range(300)
    }
    # An update after a delete is left to Spark.
    drawn = {key: ops for key, ops in drawn.items() if ops.rstrip("u") == ops or ops.rstrip("u")[-1:] not in ("d", "b")}
    events = pa.Table.from_pylist(
        [
            {
                "key": key,
                "op": "d" if op == "b" else op,
                "sequence": f"{at:024x}",
                "offset": at,
                "after": f'{{"n":{at}}}' if op == "c" else None,
                "before": f'{{"b":{at}}}' if op == "b" else None,
                "documentKey": f'{{"_id":"{key}"}}',
            }
            for at, (key, op) in enumerate(
                (key, op) for place in range(6) for key, ops in drawn.items() for op in ops[place : place + 1]
            )
        ]
    )
    shows = mode.marks_deleted
    is_partial = reduce.are_partial(events).combine_chunks()
    noted = in_process_fold.noted(in_process._with_deleted(events) if shows else events, is_partial)
    noted = in_process_fold.shown(noted) if shows else noted
    winners, _ = in_process._winners(noted)
    columns = ["__sequence", "__known", "__incomplete", "__deleted"]
    found = noted.events.take(pa.array(winners))
    ours = {row.pop("key"): row for row in found.select(["key", *columns, "after"]).to_pylist()}
    types = "key STRING, op STRING, sequence STRING, offset BIGINT, after STRING, before STRING, documentKey STRING"
    df = spark.createDataFrame([tuple(row.values()) for row in events.to_pylist()], types)
    reduced = reduce.decided(reduce.latest(df, columns=("op", "before", "documentKey"), keeps_last=shows), mode=mode)
    expected = {
        row.pop("__key"): row for row in reduced.select("__key", "__action", *columns, "after").toArrow().to_pylist()
    }
    documents, marks = {}, {}
    for key, row in expected.items():
        action, is_bare = row.pop("__action"), row["__deleted"] and row["__known"] == ""
        if action == reduce.Action.MARK.value or (action == reduce.Action.DOCUMENT.value and is_bare):
            marks[key] = (row["__sequence"], row["__deleted"])
        elif action == reduce.Action.DOCUMENT.value:
            documents[key] = row
    assert ours == documents
    assert {key: (mark.sequence, mark.delete is not None) for key, mark in noted.marks.items()} == marks
    assert {row["__incomplete"] for row in documents.values()} == {True, False} and len(marks) > 20
    assert (len(marks) + len(documents) == len(drawn)) == shows


def test_an_added_struct_is_the_text_that_sql_writes(spark: SparkSession) -> None:
    """With any characters, and with null fields and elements."""
    texts = [
        None,
        "",
        '"\\/',
        "\\u001f",
        "é\u2028\U0001f600\x7f",
        *(f"{chr(code)}{chr(code + 16)}" for code in range(1, 16)),
    ]
    cuts = [None, [], [{"field": "a\x1f", "size": 1}, {"field": None, "size": None}, None]]
    rows = [
        {
            "updatedFields": text,
            "removedFields": [text, "a"],
            "truncatedArrays": cuts[number % 3],
            "disambiguatedPaths": None,
        }
        for number, text in enumerate(texts)
    ]
    events = pa.table({"updateDescription": pa.array([None, {}, *rows], bronze.UPDATE_DESCRIPTION)})
    options = unwrap_options.parse({"add.fields": "updateDescription,updateDescription.truncatedArrays"})
    columns = reduce.added(options)
    expected = spark.createDataFrame(events).select(*(each.value.alias(each.name) for each in columns)).toArrow()
    found = pa.table({each.name: collection_events.value(events, each.path or ()) for each in columns})
    assert found.to_pylist() == expected.to_pylist()


@pytest.fixture(scope="module")
def begun(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Hop:
    """Four documents in both layers."""
    found = Hop(spark, pipeline(tmp_path_factory.mktemp("begun")))
    found.bronze.append({"t": [{"op": "c", "key": key, "at": 10 + key, "after": {"_id": key, "n": 0}} for key in range(4)]})
    found.run()
    return found


@pytest.fixture
def hop(begun: Hop, tmp_path: Path) -> Hop:
    """The same tables in a lakehouse for one test."""
    return begun.copied(tmp_path)


@pytest.mark.journey
def test_a_quarantine_that_holds_nothing_any_more_hinders_nothing(hop: Hop, by_process: dict[str, int]) -> None:
    """Neither is Spark needed while an event is held, for its document or for others."""
    alone = []
    for key, at, text in ((1, 20, "{"), (2, 21, '{"_id":2,"n":1}'), (1, 22, '{"_id":1,"n":2}'), (1, 23, '{"_id":1,"n":3}')):
        hop.bronze.append({"t": [{"op": "u", "key": key, "at": at, "text": text}]})
        before = by_process["silver"]
        hop.run()
        alone.append(by_process["silver"] > before)
    assert alone == [True] * 4
    assert [row["n"] for row in hop.documents("t")] == [0, 3, 1, 0]


@pytest.mark.journey
def test_a_compaction_of_bronze_hinders_nothing(hop: Hop, by_process: dict[str, int]) -> None:
    """A compaction merges applied and new events into one file. Previously every batch after one was applied by Spark."""
    hop.bronze.append({"t": [{"op": "u", "key": 1, "at": 20, "after": {"_id": 1, "n": 5}}]})
    hop.spark.sql(f"OPTIMIZE {hop.bronze.table}").collect()
    before = by_process["silver"]
    hop.run()
    assert by_process["silver"] == before + 1 and [row["n"] for row in hop.documents("t")] == [0, 5, 0, 0]


@pytest.mark.journey
def test_a_long_span_whose_first_range_is_sparks_is_sparks(
    hop: Hop, by_process: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark applies it as one range; this process would cut it into several, each with its position."""
    monkeypatch.setattr(collection_events, "PORTION_EVENTS", 2)
    monkeypatch.setattr(in_process, "MANY_EVENTS", 2)
    spark_reads = '{"_id":0,"n":0,"text":"\\ud800"}'
    others = [f'{{"_id":{key},"n":{key}}}' for key in (1, 2, 3, 1)]
    texts = [spark_reads, *others[:3], spark_reads, *others[3:]]
    for at, text in enumerate(texts):
        hop.bronze.append({"t": [{"op": "u", "key": int(text[7]), "at": 20 + at, "text": text}]})
    before, version = by_process["silver"], hop.silver().collections[0].version
    commits = [*table_history.newest_first(hop.spark, hop.silver_table("t"))]
    reached = {commit.metadata.get("to") for commit in commits if commit.version <= version and commit.metadata}
    assert reached - {None} == {1, 3, 7}
    assert by_process["silver"] == before
    hop.run()
    assert [row["n"] for row in hop.documents("t")] == [0, 1, 2, 3]


def test_a_snapshot_of_several_ranges_is_not_late_for_itself(
    hop: Hop, by_process: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows of a snapshot have the same sequence. Of two rows of one key the later one counts, as within a range, and in each way."""
    monkeypatch.setattr(collection_events, "PORTION_EVENTS", 1)
    monkeypatch.setattr(in_process, "MANY_EVENTS", 1)
    for key, n in ((0, 1), (1, 2), (0, 3)):
        hop.bronze.append({"t": [{"op": "r", "key": key, "at": 20, "after": {"_id": key, "n": n}}]})
    before = by_process["silver"]
    hop.run()
    assert by_process["silver"] == before + 3
    assert [row["n"] for row in hop.documents("t")] == [3, 2, 0, 0]
    for key in (0, 1):  # a new table, with the snapshot's end in the same run
        end = [{"sweep": 30}] if key else []
        hop.bronze.append({"new": [{"op": "r", "key": key, "at": 30, "after": {"_id": key}}, *end]})
    hop.run()
    assert by_process["silver"] == before + 5
    assert [row["_id"] for row in hop.documents("new")] == [0, 1]
    # Also for a MERGE, which an update without a document needs.
    monkeypatch.setattr(collection_events, "LOCAL_EVENTS", -1)
    last = [{"op": "r", "key": 0, "at": 20, "after": {"_id": 0, "n": 4}}, {"op": "u", "key": 2, "at": 21}]
    hop.bronze.append({"t": last})
    hop.silver()
    assert by_process["silver"] == before + 5
    assert [row["n"] for row in hop.rows("t")] == [4, 2, 0, 0]


@pytest.mark.parametrize(("name", "after"), [("define", True), ("replace_arrow", False)], ids=["after", "before"])
@pytest.mark.parametrize("layer", ["silver", "gold"])
def test_killed_between_two_commits_it_goes_on(
    hop: Hop, monkeypatch: pytest.MonkeyPatch, layer: str, name: str, after: bool
) -> None:
    """New columns were added and the rows were not. Kills at other steps are in `tests/unit/silver/test_killed_in_process.py`."""
    monkeypatch.setattr(maintenance, "MANY_FILES", 1)
    new = {"op": "u", "key": 1, "at": 20, "after": {"_id": 1, "n": 1, "new": "x"}}
    hop.bronze.append({"t": [new, {"op": "d", "key": 2, "at": 21}, {"op": "c", "key": 7, "at": 22, "after": {"_id": 7}}]})
    if layer == "gold":
        hop.silver()
    killed_at(getattr(hop, layer), Writer, name, after=after)
    hop.run()
    expected = [{"_id": 0, "n": 0}, {"_id": 1, "n": 1, "new": "x"}, {"_id": 3, "n": 0}, {"_id": 7}]
    assert [{name: row[name] for name in row if name != "__key"} for row in hop.documents("t")] == expected


def test_small_files_are_put_together(hop: Hop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files of silver and gold are compacted without their deleted rows; rows and positions stay."""
    monkeypatch.setattr(maintenance, "MANY_FILES", 4)
    for number in range(6):
        values = {"n": number, "at": {"$date": {"$numberLong": "253402300799999"}}, "deep": {f"d{number}": [number]}}
        update = {"op": "u", "key": number % 4, "at": 20 + number, "after": {"_id": number % 4, **values}}
        hop.bronze.append({"t": [update, {"op": "d", "key": 3, "at": 40 + number}][: 1 + (number == 5)]})
        hop.run()
    for table in (hop.silver_table("t"), hop.gold_table("t")):
        live = live_files.LiveFiles(Path(table.path or ""))
        assert live.move_to(table_history.version(hop.spark, table)) and len(live.files()) < 4
        commits = [*table_history.newest_first(hop.spark, table)]
        assert all(commit.metadata is not None for commit in commits[:-1])  # no commit of a compaction by Spark
    rows = rows_by_spark(hop.spark, hop.gold_table("t"))
    assert [(row["_id"], row["n"]) for row in rows] == [(0, 4), (1, 5), (2, 2)]
    assert rows[1]["deep"]["d5"] == [5]
    before = [table_history.version(hop.spark, table) for table in (hop.silver_table("t"), hop.gold_table("t"))]
    hop.run()
    assert [table_history.version(hop.spark, table) for table in (hop.silver_table("t"), hop.gold_table("t"))] == before


@pytest.mark.journey
def test_files_that_others_changed_are_not_put_together(hop: Hop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that somebody deletes during a compaction do not come back."""
    monkeypatch.setattr(maintenance, "MANY_FILES", 2)
    rows, calls = live_files.LiveFiles.rows, []

    def late(self: live_files.LiveFiles, *arguments: Any) -> Any:
        found = rows(self, *arguments)
        if "gold" in self.folder.parts and not calls:
            calls.append(len(found))
            hop.spark.sql(f"DELETE FROM {hop.gold_table('t')} WHERE _id = 0").collect()
        return found

    monkeypatch.setattr(live_files.LiveFiles, "rows", late)
    for number in range(4):
        hop.bronze.append({"t": [{"op": "u", "key": 1, "at": 20 + number, "after": {"_id": 1, "n": number}}]})
        hop.run()
    assert calls and [row["_id"] for row in hop.documents("t")] == [1, 2, 3]


@pytest.mark.journey
@pytest.mark.parametrize("layer", ["silver", "gold"])
def test_a_commit_in_between_is_seen(hop: Hop, monkeypatch: pytest.MonkeyPatch, layer: str) -> None:
    """The table is compacted between the search for keys and the commit: the keys are searched for again in the new version."""
    places, calls = live_files.LiveFiles.places, []
    table = hop.silver_table("t") if layer == "silver" else hop.gold_table("t")

    def late(self: live_files.LiveFiles, *arguments: Any) -> Any:
        found = places(self, *arguments)
        if layer in self.folder.parts:
            if not calls:
                maintenance.optimize(hop.spark, table)
            calls.append([len(rows) for _, rows in found])
        return found

    for key in (0, 3):  # a compaction needs more than one file
        hop.bronze.append({"t": [{"op": "u", "key": key, "at": 15 + key, "after": {"_id": key, "n": 1}}]})
        hop.run()
    monkeypatch.setattr(live_files.LiveFiles, "places", late)
    hop.bronze.append({"t": [{"op": "u", "key": 1, "at": 20, "after": {"_id": 1, "n": 2}}, {"op": "d", "key": 2, "at": 21}]})
    hop.run()
    assert calls == [[2], [2]]
    assert [(row["_id"], row["n"]) for row in rows_by_spark(hop.spark, hop.gold_table("t"))] == [(0, 1), (1, 2), (3, 1)]


@pytest.mark.parametrize(
    ("change", "keeps"),
    [
        ("ADD COLUMNS (note STRING)", "note"),
        ("ALTER COLUMN n COMMENT 'how many'", "how many"),
        ("ADD CONSTRAINT small CHECK (n < 100)", "small"),
    ],
)
def test_what_others_changed_meanwhile_is_neither_undone_nor_passed_by(hop: Hop, change: str, keeps: str) -> None:
    """This also holds for changes after a service's last commit, which the writer has not seen."""
    table = hop.gold_table("t")
    writer = Writer.claim(hop.spark, table)
    live = writer.live
    assert live is not None and live.move_to(writer.version)
    columns = live.spark_schema().add("new", "string")
    rows = live.rows_above("n", -1, columns=live.schema.names, limit=100).slice(0, 1)
    hop.spark.sql(f"ALTER TABLE {table} {change}").collect()
    if "CONSTRAINT" not in change:
        assert not writer.define(columns)
    if "COLUMNS" in change or "CONSTRAINT" in change:
        assert (
            writer.replace_arrow([rows], schema=rows.schema, keys=rows["__key"].to_pylist(), to=writer.metadata["to"])
            is None
        )
    described = hop.spark.sql(f"DESCRIBE TABLE EXTENDED {table}").collect()
    assert any(keeps in str(row) for row in described) and not any(row.col_name == "new" for row in described)
    writer.release()


def test_a_check_of_the_users_is_for_delta_to_make(hop: Hop, by_process: dict[str, int]) -> None:
    hop.spark.sql(f"ALTER TABLE {hop.silver_table('t')} ADD CONSTRAINT small CHECK (n < 100)").collect()
    before = dict(by_process)
    hop.bronze.append({"t": [{"op": "u", "key": 1, "at": 20, "after": {"_id": 1, "n": 5}}]})
    hop.run()
    assert by_process["silver"] == before["silver"]
    assert [row["n"] for row in hop.documents("t")] == [0, 5, 0, 0]


def test_statistics_of_gold_let_delta_skip_files(hop: Hop) -> None:
    """The minimum and maximum of each file include all of its rows, also for long texts and far dates."""
    texts = ["a" * 40, "z" * 32 + "\U0010ffff" * 3, "m"]
    for number, (text, date) in enumerate(zip(texts, ("1", "253402300799999", "-30000000000000"))):
        after = {"_id": number, "text": text, "date": {"$date": {"$numberLong": date}}, "n": number}
        hop.bronze.append({"t": [{"op": "u", "key": number, "at": 30 + number, "after": after}]})
        hop.run()
    table = hop.spark.table(str(hop.gold_table("t")))
    for number, text in enumerate(texts):
        assert [row._id for row in table.where(table.text == text).select("_id").collect()] == [number]
        same = table.where(table._id == number).select("date").toArrow()["date"][0]
        assert table.where(f"date = timestamp_micros({same.value})").count() == 1
    assert table.where("n = 0").count() == 2


def test_a_schema_begins_the_same_whoever_looks(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """A schema begins with the first documents in the order of the events, or in the order of their digests if a snapshot's chunk gives
    many the same sequence.
    """
    monkeypatch.setattr(looks, "BEGINNING", 7)
    rng = random.Random(3)
    kinds = [1, "x", 2.5, None, {"deep": 1}, [1, "x"], {"$numberLong": "7"}, {"$date": {"$numberLong": "1"}}]
    for number in range(3):
        texts = [
            json.dumps({"_id": n, **{f"f{rng.randrange(9)}": rng.choice(kinds) for _ in range(3)}}) if n % 5 else None
            for n in range(40)
        ]
        sequences = [f"{rng.randrange(3 if number else 10**6):024x}" for _ in texts]
        rows = pa.table({"after": pa.array(texts, pa.string()), "sequence": sequences})
        settings: dict[str, Any] = {"options": UnwrapOptions(), "pins": {}}
        there = batch_evolution.begun(looks.SparkDocuments(spark.createDataFrame(rows)), **settings)
        here = batch_evolution.begun(looks.LocalDocuments(*(column.combine_chunks() for column in rows.columns)), **settings)
        assert there is not None and here is not None
        assert (here.schema.to_json(), here.seen_at) == (there.schema.to_json(), there.seen_at)
