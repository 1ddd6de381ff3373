"""Unreadable events: which are held, what silver is given instead, and how they are replayed."""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from cdc_core import errors
from cdc_core.bronze import columns as bronze
from cdc_core.bronze.batch_range import BatchRange
from cdc_core.schema.document_schema import DocumentSchema
from cdc_core.silver import quarantine, quarantine_split
from cdc_core.tables import layout as tables
from cdc_core.typed import exact
from pipelines.bronze import log as bronze_table
from pipelines.bronze import quarantine_table
from pipelines.delta import ops_tables, table_history
from pipelines.delta.writer import Writer
from pipelines.operations import quarantine as quarantines
from pipelines.silver import evolve
from pipelines.silver import tables as silver_tables
from tests.harness import bronze_rows
from tests.harness.layers import Hop, document, pipeline

Reason = quarantine.Reason
BROKEN = '{"_id":1,"a":'


def sequence(number: int) -> str:
    """The sequence of an event by its number; three events share a cluster time."""
    return f"{1:08x}{number // 3:08x}{number % 3:08x}"


def event(number: int, op: str, *, key: str | None = "1", **columns: Any) -> dict[str, Any]:
    """A bronze row. `text` is its document, or the updated fields for `p`, an update without a document."""
    text = columns.pop("text", '{"_id":1}')
    is_partial = op == "p"
    description = {
        "updatedFields": text,
        "removedFields": None,
        "truncatedArrays": None,
        "disambiguatedPaths": None,
    }
    row = dict.fromkeys(bronze.SCHEMA.names) | {
        "resume_token": f"token-{number}",
        "offset": number,
        "batch": 1,
        "kind": "change",
        "op": "u" if is_partial else op,
        "db": "shop",
        "collection": "orders",
        "key": key,
        "sequence": sequence(number),
        "after": None if is_partial or op == "d" else text,
        "updateDescription": description if is_partial else None,
    }
    return row | columns


def frame(spark: SparkSession, rows: Sequence[dict[str, Any]]) -> DataFrame:
    return spark.createDataFrame(pa.Table.from_pylist(list(rows), schema=bronze.SCHEMA))


def no_facts(spark: SparkSession) -> DataFrame:
    return spark.createDataFrame([], quarantine.COLUMNS_DDL)


def no_rows(spark: SparkSession) -> DataFrame:
    """Silver's table before its first row."""
    return spark.createDataFrame([], "__key STRING, __sequence STRING, __known STRING")


def documents(spark: SparkSession, *stored: tuple[str, str]) -> DataFrame:
    """The keys of documents in the table, with their sequences."""
    return spark.createDataFrame(list(stored), "key STRING, sequence STRING")


def split(
    spark: SparkSession,
    rows: Sequence[dict[str, Any]],
    *,
    waiting: DataFrame | None = None,
    stored: Sequence[tuple[str, str]] = (),
    to: int = 1,
) -> tuple[list[tuple[Any, ...]], list[tuple[str, str]]]:
    """The events that silver is given, by number or as a mark, and the facts."""
    result = quarantine.split(
        frame(spark, rows), waiting=waiting or no_facts(spark), stored=documents(spark, *stored), to=to
    )
    given, facts = collected(result.events), collected(result.facts)
    assert (given, facts) == here(rows, collected(waiting or no_facts(spark)), stored, to)
    numbers = {sequence(number): number for number in range(100)}
    return (
        [(numbers.get(row["sequence"], "mark"), row["op"]) for row in given],
        sorted((row["resume_token"], row["reason"]) for row in facts),
    )


def collected(rows: DataFrame) -> list[dict[str, Any]]:
    return ordered(row.asDict(recursive=True) for row in rows.collect())


def ordered(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: (row["sequence"] or "", row["offset"], row.get("reason", "")))


def here(
    rows: Sequence[dict[str, Any]], waiting: Sequence[dict[str, Any]], stored: Sequence[tuple[str, str]], to: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The same without Spark."""
    events = pa.Table.from_pylist(list(rows), schema=bronze.SCHEMA)
    held = pa.Table.from_pylist(list(waiting), schema=quarantine_split.SCHEMA)
    found = quarantine_split.split(events, waiting=held, stored=lambda keys: dict(stored), to=to)
    return (
        (ordered(rows), [])
        if found is None
        else (
            ordered(found.events.to_pylist()),
            ordered(found.facts.to_pylist()),
        )
    )


UNREADABLE = (
    "",
    "{",
    "[]",
    "5",
    "null",
    BROKEN,
    "{} x",
    "{'a':1}",
    '{"a":1}}',
    '{"a":1}{"b":2}',
    '{"a":"\t"}',
    r"""{"a":"\'"}""",
)
DESCRIPTION = {"updatedFields": "{}", "disambiguatedPaths": "{"}
JUDGED: tuple[tuple[dict[str, Any], quarantine.Reason | None], ...] = (
    (event(1, "c"), None),
    (event(1, "d"), None),
    (event(1, "p"), None),
    (event(1, "u", after=None), None),
    (event(1, "r", text='{"a":1,"a":{"b":[1.0,"\\u0000}"]}}'), None),
    (event(1, "c", key=None), Reason.NO_KEY),
    (event(1, "c", sequence=None), Reason.NO_SEQUENCE),
    *[(event(1, "c", sequence=text), Reason.NO_SEQUENCE) for text in ("5", "z" * 24, "0" * 23 + "F")],
    (event(1, "x"), Reason.UNKNOWN_OPERATION),
    (event(1, "c") | {"op": None}, Reason.UNKNOWN_OPERATION),
    (event(1, "c", after=None), Reason.NO_DOCUMENT),
    *[(event(1, "c", text=text), Reason.UNREADABLE_AFTER) for text in UNREADABLE],
    (event(1, "u", text='{"a":tru}'), Reason.UNREADABLE_AFTER),
    (event(1, "p", text='{"a":[1}'), Reason.UNREADABLE_UPDATE),
    (event(1, "p", text="{'a':1}"), Reason.UNREADABLE_UPDATE),
    (event(1, "p", updateDescription=DESCRIPTION), Reason.UNREADABLE_PATHS),
    (event(1, "d", before="{"), None),
)


def test_reasons(spark: SparkSession) -> None:
    """The reason of an unreadable event is the first problem in the columns that silver needs; beside texts, the cheap condition sees each."""
    rows = [row | {"offset": number} for number, (row, _) in enumerate(JUDGED)]
    is_counted = F.coalesce(F.expr(evolve.COUNTED["suspect"]), F.lit(False)).alias("is_counted")
    found = frame(spark, rows).select("offset", quarantine.reason().alias("reason"), is_counted).orderBy("offset").collect()
    seen_by_typing = (Reason.UNREADABLE_AFTER, Reason.UNREADABLE_UPDATE, Reason.UNREADABLE_PATHS)
    assert all(row.is_counted for row in found if row.reason not in (None, *seen_by_typing))
    assert [row.reason for row in found] == [None if reason is None else reason.value for _, reason in JUDGED]
    assert [quarantine_split.reason(row) for row, _ in JUDGED] == [reason for _, reason in JUDGED]


def test_exactly_the_texts_that_silver_cannot_type_are_unreadable(spark: SparkSession) -> None:
    """Whatever happened to a text, and although Spark's JSON reader accepts some of them: their rows would be nulls."""
    rng = random.Random(5)
    texts = [*UNREADABLE, *(damaged(rng) for _ in range(6000))]
    rows = [event(number, "c", text=text) for number, text in enumerate(texts)]
    found = frame(spark, rows).select("offset", quarantine.reason().isNotNull().alias("is_bad")).orderBy("offset").collect()
    typed = exact.rows(pa.array(texts), DocumentSchema()).field("unreadable").to_pylist()
    judged = zip(texts, typed, map(quarantine_split.is_unreadable, texts), (row.is_bad for row in found), strict=True)
    assert [each for each in judged if len({*each[1:]}) > 1] == []
    assert typed.count(True) > 500 and typed.count(False) > 500


def damaged(rng: random.Random) -> str:
    """The text of a document, with some characters removed, replaced or inserted."""
    text = rng.choice(DOCUMENTS)
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(text) + 1)
        text = text[:at] + rng.choice(PIECES) + text[at + rng.randrange(3) :]
    return text


PIECES = (
    *"{}[]:,\"'\\/ \n\t\x00\x1f\ufeff\u00a0_e.-+019é\U0001f600",
    *("", "", "null", "tru", "NaN", "\\u", "\\ud800", "\\u00", "\\n", "/**/", "#", "1e", "0x1", "e5", "{}", "}}", '"a":'),
)
DOCUMENTS = (
    "{}",
    '{"_id":1}',
    ' {"a" : [1.5, -2e10, {"b":null}] ,"c":true}',
    '{"a":"x\\"y\\u0041\\\\","b":{"c":[]},"d":"it\'s"}',
    '{"a":{"$numberLong":"5"},"a":"é","":[[],{}]}',
)


def test_readable_events_pass(spark: SparkSession) -> None:
    """A range without unreadable events is unchanged."""
    rows = [event(1, "c"), event(2, "p"), event(3, "d"), event(4, "u", key="2")]
    assert split(spark, rows) == ([(1, "c"), (2, "u"), (3, "d"), (4, "u")], [])


def test_later_updates_follow(spark: SparkSession) -> None:
    """Updates after an unreadable event are held with it. A mark for the document is placed just before the event."""
    rows = [event(1, "c"), event(2, "p"), event(3, "p", text="{"), event(4, "p"), event(5, "p", key="2")]
    given, facts = split(spark, rows)
    assert given == [(1, "c"), (2, "u"), ("mark", "u"), (5, "u")]
    assert facts == [("token-3", Reason.UNREADABLE_UPDATE.value), ("token-4", Reason.FOLLOWS.value)]
    result = quarantine.split(frame(spark, rows), waiting=no_facts(spark), stored=documents(spark), to=1)
    marks = result.events.where("length(sequence) <> 24")
    [mark] = marks.collect()
    assert sequence(2) < mark.sequence < sequence(3)
    assert (mark.key, mark.after, mark.updateDescription, mark.before) == ("1", None, None, None)


def test_a_replay_in_the_same_range(spark: SparkSession) -> None:
    """A rebuild reads both in one range. The corrected event, which has the greater offset, replaces the unreadable one and holds nothing
    back.
    """
    before = [event(1, "c"), event(2, "p", text="{"), event(3, "p")]
    again = [event(2, "p", offset=12), event(3, "p", offset=13), event(4, "p", offset=14)]
    assert split(spark, before + again) == ([(1, "c"), (2, "u"), (3, "u"), (3, "u"), (4, "u")], [])
    given, facts = split(spark, [*again, event(2, "p", text="{", offset=20)])
    assert "mark" in dict(given) and (f"token-{2}", Reason.UNREADABLE_UPDATE.value) in facts


def test_a_whole_document_supersedes(spark: SparkSession) -> None:
    """After a whole document or a delete no event is held any more, and the held ones are listed."""
    rows = [
        event(10 * number + at, op, key=whole, **({"text": BROKEN} if at == 1 else {}))
        for number, whole in enumerate("curd")
        for at, op in enumerate(("c", "p", whole, "p"), 1)
    ]
    given, facts = split(spark, rows)
    assert given == [(10 * number + at, op) for number, whole in enumerate("curd") for at, op in ((3, whole), (4, "u"))]
    held = (1, Reason.UNREADABLE_AFTER), (1, Reason.SUPERSEDED), (2, Reason.FOLLOWS), (2, Reason.SUPERSEDED)
    assert facts == sorted((f"token-{10 * number + at}", reason.value) for number in range(4) for at, reason in held)


def test_a_document_that_comes_late_releases_the_updates_after_it(spark: SparkSession) -> None:
    """A snapshot's document is later than the unreadable event, and earlier than an update that waits: this one is folded onto it."""
    held = quarantine.split(
        frame(spark, [event(2, "p", text="{"), event(4, "p")]), waiting=no_facts(spark), stored=documents(spark), to=1
    ).facts
    given, facts = split(spark, [event(3, "r")], waiting=held, to=2)
    assert given == [(3, "r"), (4, "u")]
    assert facts == [("token-2", Reason.SUPERSEDED.value), ("token-4", Reason.REPLAYED.value)]


def test_an_event_that_the_table_has_passed_holds_nothing_back(spark: SparkSession) -> None:
    """A snapshot ahead of the stream has read the document after the unreadable event, which would hold back each later update."""
    given, facts = split(spark, [event(3, "p", text="{"), event(6, "p")], stored=[("1", sequence(5))])
    assert given == [(6, "u")]
    assert facts == [("token-3", Reason.SUPERSEDED.value), ("token-3", Reason.UNREADABLE_UPDATE.value)]


def test_events_without_document_or_place_hold_nothing_back(spark: SparkSession) -> None:
    """An event without a key or a sequence is held, and no other event is held because of it."""
    rows = [event(1, "c", key=None), event(2, "c", sequence=None), event(3, "p")]
    given, facts = split(spark, rows)
    assert given == [(3, "u")]
    assert facts == [("token-1", Reason.NO_KEY.value), ("token-2", Reason.NO_SEQUENCE.value)]


def test_an_unreadable_pre_image_is_left_out(spark: SparkSession) -> None:
    """An event with an unreadable pre-image is applied without it, and kept completely in quarantine."""
    rows = [event(1, "d", before="{"), event(2, "c", key="2", text="{")]
    result = quarantine.split(frame(spark, rows), waiting=no_facts(spark), stored=documents(spark), to=1)
    assert [row.before for row in result.events.where("op = 'd'").collect()] == [None]
    split(spark, rows)  # and the same without Spark
    facts = {(row.resume_token, row.before, row.reason) for row in result.facts.collect()}
    assert ("token-1", "{", Reason.UNREADABLE_BEFORE.value) in facts
    assert quarantine.held(result.facts).count() == 1


# Consecutive ranges, compared with a model


def history(rng: random.Random) -> list[dict[str, Any]]:
    """Events of many documents; a third of them is unreadable."""
    return [
        event(number, rng.choice("pppucd"), key=str(rng.randrange(25)), text=rng.choice(("{}", "{}", "{")))
        for number in range(400)
    ]


def is_broken(row: dict[str, Any]) -> bool:
    return "{" in (row["after"], (row["updateDescription"] or {}).get("updatedFields"))


def model(rows: Sequence[dict[str, Any]]) -> tuple[set[str], set[str]]:
    """The tokens of the events that are finally applied, and of those that are held, if each event is judged in order."""
    applied, waits = set(), set()
    waiting: dict[str, list[str]] = {}
    for row in rows:
        queue = waiting.setdefault(row["key"], [])
        is_partial = row["op"] == "u" and row["after"] is None
        if is_broken(row) or (is_partial and queue):
            queue.append(row["resume_token"])
        else:
            applied.add(row["resume_token"])
            if not is_partial:
                queue.clear()
    for queue in waiting.values():
        waits.update(queue)
    return applied, waits


def test_ranges_agree_with_the_model(spark: SparkSession) -> None:
    """Ranges are cut anywhere and applied twice; together they apply and hold the events of the model, with and without a list of keys."""
    rng = random.Random(3)
    rows = history(rng)
    cuts = [0, *sorted(rng.sample(range(1, 400), 2)), 400]
    facts: list[Any] = []
    applied: set[str] = set()
    named = [str(number) for number in range(25)]
    ranges = [(*each, keys) for each in zip(cuts, cuts[1:], strict=False) for keys in (named, None)]
    for low, high, keys in ranges:
        waiting = quarantine.held(spark.createDataFrame(facts, quarantine.COLUMNS_DDL), before=low)
        stored = documents(spark)
        result = quarantine.split(frame(spark, rows[low:high]), waiting=waiting, stored=stored, to=high, keys=keys)
        given, new_facts = collected(result.events), collected(result.facts)
        assert (given, new_facts) == here(rows[low:high], collected(waiting), (), high)
        facts += result.facts.collect()
        applied |= {row["resume_token"] for row in given if len(row["sequence"]) == 24}
    held = quarantine.held(spark.createDataFrame(facts, quarantine.COLUMNS_DDL)).collect()
    assert (applied, {row.resume_token for row in held}) == model(rows)


def test_any_range_is_split_as_by_sql(spark: SparkSession) -> None:
    """Events that are delivered again, corrected or not, with equal places, without a key or a place, and beside rows of any state."""
    rng = random.Random(7)
    rows = [strange(rng, number) for number in range(600)]
    stored = [(f"{key}", sequence(rng.randrange(200))) for key in range(0, 150, 2)]
    facts: list[Any] = []
    for low, high in ((0, 200), (200, 400), (400, 600), (400, 600)):
        waiting = quarantine.held(spark.createDataFrame(facts, quarantine.COLUMNS_DDL), before=low)
        result = quarantine.split(
            frame(spark, rows[low:high]), waiting=waiting, stored=documents(spark, *stored), to=high, keys=None
        )
        new_facts = collected(result.facts)
        assert (collected(result.events), new_facts) == here(rows[low:high], collected(waiting), stored, high)
        facts += new_facts
    assert {row["reason"] for row in facts} == {reason.value for reason in Reason}
    with_holes = quarantine_split.with_holes(pa.Table.from_pylist(rows, schema=bronze.SCHEMA))
    assert with_holes is not None
    expected = collected(quarantine.readable(frame(spark, rows), with_holes=True))
    assert ordered(with_holes.to_pylist()) == expected


def strange(rng: random.Random, number: int) -> dict[str, Any]:
    """Any event, of few documents; its place and its token may be those of another one."""
    place = number // 3 - rng.choice((0, 0, 0, 1, 5, 60))
    row = event(max(0, place), rng.choice("pppppucdrx"), key=rng.choice((None, *map(str, range(150)))))
    row |= {"offset": number, "resume_token": f"token-{place}", "key": rng.choice((row["key"], str(place)))}
    texts = ("{}", "{}", '{"a":1}', "{", None)
    if row["updateDescription"] is None:
        row |= {"after": rng.choice(texts), "before": rng.choice(texts)}
    else:
        row["updateDescription"] |= {name: rng.choice(texts) for name in ("updatedFields", "disambiguatedPaths")}
    return row | ({"sequence": rng.choice((None, "5"))} if rng.random() < 0.05 else {})


# Tables


@pytest.fixture
def layout(lakehouse: Path) -> tables.Layout:
    return tables.Layout(root=str(lakehouse))


@pytest.fixture(scope="module")
def held(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> tables.Layout:
    """Two unreadable events and one that follows the first of them are held. No test writes to these tables."""
    layout = tables.Layout(root=str(tmp_path_factory.mktemp("held")))
    broken = event(2, "p", text='{"secret":'), event(4, "c", key="2", text="{")
    filled(spark, layout, [event(1, "c"), broken[0], event(3, "p"), broken[1]])
    assert applied(spark, layout, 0, 2) == ["token-1", "token-2", "token-4"]  # two of them are marks
    return layout


def filled(spark: SparkSession, layout: tables.Layout, rows: Sequence[dict[str, Any]]) -> None:
    log = bronze_table.BronzeLog.open(spark, layout.bronze("shop"), extra={"stream": "fingerprint"})
    log.append(
        lambda batch, first: pa.Table.from_pylist(
            [row | {"batch": batch, "offset": first + n} for n, row in enumerate(rows)], schema=bronze.SCHEMA
        ),
        token="position",
    )
    log.heartbeat({}, token="position", ts_ms=0)
    log.close()


def applied(spark: SparkSession, layout: tables.Layout, after: int, to: int) -> list[str]:
    """The tokens of the events that silver would apply of a range, in order of their sequence."""
    span = BatchRange(after, to)
    events = spark.table(str(layout.bronze("shop"))).where(f"{span.predicate} AND kind = 'change'")
    suspects = not events.where(quarantine.is_suspect()).isEmpty()
    table = layout.quarantine("shop", "orders")
    keys = events.select(F.col("key").alias("__key"))
    parts = quarantine_table.applicable(
        spark, table, events=events, keys=keys, rows=lambda: no_rows(spark), span=span, has_suspects=suspects
    )
    return [row.resume_token for row in (events if parts is None else parts).orderBy("sequence").collect()]


def test_a_name_of_any_length_can_be_read(spark: SparkSession) -> None:
    """Spark's JSON reader accepts names of up to 50,000 characters."""
    name = "n" * 50_001
    escaped = rf"\"{name}\u0001\\"
    texts = [f'{{"{name}":1}}', f'{{"_id":1,"a":[{{"{name}" : {{"{name}":"\\""}}}}]}}', f'{{"_id":1,"a":{{"{escaped}":1}}}}']
    rows = [event(number, op, text=text) for number, (op, text) in enumerate((op, text) for op in "cup" for text in texts)]
    broken = [event(number, "c", text=text[:-1]) for number, text in enumerate(texts, len(rows))]
    found = frame(spark, [*rows, *broken]).select("offset", quarantine.reason().alias("reason")).orderBy("offset").collect()
    assert [row.reason for row in found] == [None] * 9 + [Reason.UNREADABLE_AFTER.value] * 3
    assert [quarantine_split.reason(row) for row in [*rows, *broken]] == [row.reason for row in found]


def test_replay(spark: SparkSession, layout: tables.Layout, held: tables.Layout) -> None:
    """A corrected event is replayed once in its original place, with all events that follow it; again after a RESTORE of the quarantine."""
    shutil.copytree(str(held.root), str(layout.root))
    table = layout.quarantine("shop", "orders")
    seen = quarantine_table.HeldEvents.of(spark, table)
    assert seen is not None and seen.keys() == {"1", "2"}
    assert [(each.resume_token, each.reason) for each in quarantines.listed(spark, table)] == [
        ("token-2", Reason.UNREADABLE_UPDATE.value),
        ("token-3", Reason.FOLLOWS.value),
        ("token-4", Reason.UNREADABLE_AFTER.value),
    ]
    # A range only reads what is held of its own documents: the table may have a million rows.
    keys = spark.createDataFrame([("2",), ("3",)], "__key STRING")
    waiting = quarantine_table._waiting(spark, table, keys, before=2)
    assert waiting is not None and [row.resume_token for row in waiting.collect()] == ["token-4"]
    arguments: dict[str, Any] = {"name": "shop", "namespace": ("shop", "orders"), "now_ms": 0}
    correct = {"token-2": {"updatedFields": '{"a":1}'}}
    replayed = quarantines.replay(spark, layout, tokens=["token-2"], corrections=correct, **arguments)
    assert replayed == quarantines.ReplayResult(2, 3)
    again = quarantines.replay(spark, layout, tokens=["token-3"], corrections=correct, **arguments)
    assert again == quarantines.ReplayResult(0, None)
    assert bronze_table.read_position(spark, layout.bronze("shop")) == bronze_table.BronzePosition("position", 3, 7)
    commit = table_history.last_commit(spark, layout.bronze("shop"))
    assert commit is not None and commit.metadata is not None and commit.metadata["stream"] == "fingerprint"
    rows = spark.table(str(layout.bronze("shop"))).where("batch = 3 AND kind = 'change'").orderBy("offset").collect()
    assert [(row.resume_token, row.sequence) for row in rows] == [
        ("token-2", sequence(2)),
        ("token-3", sequence(3)),
    ]
    version = table_history.version(spark, table)
    assert applied(spark, layout, 2, 3) == ["token-2", "token-3"]
    assert [each.resume_token for each in quarantines.listed(spark, table)] == ["token-4"]
    assert quarantine_table.count(spark, table) == 1 and (seen.keys(), seen.keys(before=2)) == ({"2"}, {"1", "2"})
    states = {each.resume_token: each.state for each in quarantines.listed(spark, table, all_states=True)}
    assert states["token-2"] is quarantines.EventState.ENDED
    # The facts that ended their stay are lost, and silver has passed the replay: held for ever, they would hold each later update.
    spark.sql(f"RESTORE TABLE {table} TO VERSION AS OF {version}").collect()
    silver_tables.create(spark, layout.silver("shop", "orders"))
    Writer.claim(spark, layout.silver("shop", "orders")).mark(to=3)
    restored = quarantines.replay(spark, layout, tokens=["token-3"], corrections=correct, **arguments)
    assert restored == quarantines.ReplayResult(2, 4)
    assert applied(spark, layout, 3, 4) == ["token-2", "token-3"]
    assert [each.resume_token for each in quarantines.listed(spark, table)] == ["token-4"]


def test_a_fact_that_comes_beside_maintenance_stays(
    spark: SparkSession, layout: tables.Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event whose stay ended is held again, by a replay that could not be read, after maintenance has listed the endings."""
    filled(spark, layout, [event(4, "c", text="{", ts_ms=1)])
    applied(spark, layout, 0, 2)
    table = layout.quarantine("shop", "orders")
    (fact,) = spark.table(str(table)).collect()
    quarantine_table.supersede(spark, table, before=sequence(9), to=3)
    again = spark.createDataFrame([fact], spark.table(str(table)).schema).withColumn("to", F.lit(4).cast("bigint"))

    @contextlib.contextmanager
    def held_and_appended(df: DataFrame) -> Iterator[DataFrame]:
        rows = df.localCheckpoint()
        ops_tables.append(again, table)
        yield rows

    monkeypatch.setattr(quarantine_table.query_execution, "held", held_and_appended)
    assert quarantine_table.dismiss(spark, table, before_ms=2**62, applied=3) == 1
    assert [(row.resume_token, row.to) for row in spark.table(str(table)).collect()] == [("token-4", 4)]


@pytest.mark.journey
def test_a_replay_brings_back_what_can_be_read_and_no_more(spark: SparkSession, layout: tables.Layout) -> None:
    """For each document the events before the first one that is still unreadable are replayed; the others stay."""
    filled(
        spark,
        layout,
        [event(1, "p", text="{"), event(2, "p"), event(3, "p", text="["), event(4, "p"), event(5, "c", key=None)],
    )
    assert applied(spark, layout, 0, 2) == ["token-1"]  # a mark
    arguments: dict[str, Any] = {"name": "shop", "namespace": ("shop", "orders"), "now_ms": 0}
    assert quarantines.replay(spark, layout, **arguments) == quarantines.ReplayResult(0, None, 5)
    assert bronze_table.newest(spark, layout.bronze("shop")).batch == 2
    correct = {"token-1": {"updatedFields": "{}"}}
    assert quarantines.replay(spark, layout, corrections=correct, **arguments) == quarantines.ReplayResult(2, 3, 3)
    assert applied(spark, layout, 2, 3) == ["token-1", "token-2", "token-3"]  # the last one is a mark
    held = [*quarantines.listed(spark, layout.quarantine("shop", "orders"))]
    assert [each.resume_token for each in held] == ["token-3", "token-4", "token-5"]


@pytest.mark.journey
def test_many_events_come_back_in_several_commits(
    spark: SparkSession, layout: tables.Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A million events fit neither in one commit nor in memory. Those of one document stay together, and each is replayed once."""
    monkeypatch.setattr(quarantines, "PORTION_EVENTS", 2)
    broken = [event(3 * number + 1, "p", key=str(number), text="{") for number in range(4)]
    filled(spark, layout, [*broken, event(13, "p", key="0"), event(14, "p", key="0"), event(15, "c", key=None)])
    applied(spark, layout, 0, 2)
    arguments: dict[str, Any] = {"name": "shop", "namespace": ("shop", "orders"), "now_ms": 0}
    correct = {row["resume_token"]: {"updatedFields": "{}"} for row in broken}
    assert quarantines.replay(spark, layout, corrections=correct, **arguments) == quarantines.ReplayResult(6, 5, 1)
    assert quarantines.replay(spark, layout, corrections=correct, **arguments) == quarantines.ReplayResult(0, None, 1)
    again = spark.table(str(layout.bronze("shop"))).where("batch > 2 AND kind = 'change'").orderBy("offset").collect()
    batches = {row.key: {each.batch for each in again if each.key == row.key} for row in again}
    assert len(again) == 6 and all(len(each) == 1 for each in batches.values()) and len(set.union(*batches.values())) == 3
    assert applied(spark, layout, 2, 5) == [row.resume_token for row in sorted(again, key=lambda row: row.sequence)]
    assert [each.key for each in quarantines.listed(spark, layout.quarantine("shop", "orders"))] == [None]


def test_what_an_event_holds_is_shown_only_when_asked_for(spark: SparkSession, held: tables.Layout) -> None:
    """A listed event has its collection, key, place and reason; its texts are only included with `with_texts`."""
    table = held.quarantine("shop", "orders")
    assert "secret" not in repr([*quarantines.listed(spark, table)])
    assert [each.key for each in quarantines.listed(spark, table, most=1)] == ["1"]
    first, follower, last = quarantines.listed(spark, table, with_texts=True)
    assert (first.collection, first.key, first.batch) == ("shop.orders", "1", 1)
    assert (first.texts, last.texts) == ({"updatedFields": '{"secret":'}, {"after": "{"})
    assert follower.texts == {"updatedFields": '{"_id":1}'}


def test_wrong_replays_are_refused(spark: SparkSession, held: tables.Layout) -> None:
    """Unknown tokens and unreadable corrections are refused, and nothing is replayed."""
    with pytest.raises(errors.SettingsError) as refused:
        quarantines.replay(
            spark,
            held,
            name="shop",
            namespace=("shop", "orders"),
            tokens=["token-4", "token-9"],
            corrections={"token-4": {"after": "{", "op": "{}"}, "token-8": {}},
            now_ms=0,
        )
    assert [problem.path for problem in refused.value.problems] == [
        "token-8",
        "token-9",
        "token-4.after",
        "token-4.op",
    ]
    assert bronze_table.newest(spark, held.bronze("shop")).batch == 2


def test_a_snapshot_of_the_whole_ends_what_is_held_from_before_it(spark: SparkSession, tmp_path: Path) -> None:
    """The snapshot has read all documents of the source; a document that it did not find was deleted without an event. In the delete mode
    `drop` no document is taken for deleted. A drop ends all held events: they can never be applied, and maintenance may remove them.
    """
    swept = Hop(spark, pipeline(tmp_path / "swept"))
    swept.bronze.append({"t": [document(1, 10, "c"), {"op": "c", "key": 2, "at": 11, "text": "{"}]})
    swept.silver()
    assert quarantine_table.count(spark, swept.layout.quarantine(bronze_rows.DB, "t")) == 1
    kept = swept.copied(tmp_path / "kept")
    kept.settings = pipeline(tmp_path / "kept", {"t": {"delete.tombstone.handling.mode": "drop"}})
    for hop, held in ((swept, ["3"]), (kept, ["2", "3"])):
        read = [document(1, 40, "r"), {"op": "c", "key": 3, "at": 50, "text": "{"}, {"sweep": 40}]
        hop.bronze.append({"t": read})
        hop.silver()
        listed = [*quarantines.listed(spark, hop.layout.quarantine(bronze_rows.DB, "t"))]
        assert sorted(str(each.key) for each in listed) == held
    swept.bronze.append({"t": [{"drop": 60}]})
    swept.silver()
    assert quarantine_table.count(spark, swept.layout.quarantine(bronze_rows.DB, "t")) == 0 and not swept.rows("t")
