"""Snapshots that fail, or do not read everything: the stream continues, and status shows which collections are incomplete."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from bson.timestamp import Timestamp

from cdc_core import errors
from pipelines.bronze import log as bronze
from pipelines.capture.progress import refuse_unread
from pipelines.capture.stream_opener import StreamOpener
from pipelines.mongodb import catalog, change_stream, snapshot_read
from pipelines.mongodb import failures as mongodb_failures
from pipelines.mongodb import server as mongodb_server
from pipelines.operations import status
from pipelines.snapshot import snapshot
from tests.harness.captures import QUICK, check_numbers, notifications, once, pipeline, plans, rows, snapshots, table

REFUSED = {
    "text": '{"$text": {"$search": "x"}}',
    "near": '{"place": {"$near": [0, 0]}}',
    "divide": '{"$expr": {"$gt": [{"$divide": [1, "$zero"]}, 0]}}',
    "where": '{"$where": "throw new Error(this.secret)"}',
    "number": '{"$expr": {"$gt": [{"$toInt": "$secret"}, 0]}}',
}
"""Filters that `explain` accepts, but with which `find` fails on the documents or because of the hint."""

SECRET = "secret-123-45-6789"


def by_name(spark: Any, found: Any) -> dict[str, status.CollectionStatus]:
    return {each.collection.rpartition(".")[2]: each for each in status.read(spark, found).collections}


def test_filters_that_fail_when_they_are_read_end_their_snapshot_and_not_the_stream(
    spark: Any, mongodb_uri: str, database: Any, lakehouse: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each snapshot fails separately, with its error code and no content of a document. The stream, other snapshots and restarts
    continue.
    """
    database.a.insert_many([{"_id": number, "zero": 0, "secret": SECRET, "place": [1, 1]} for number in range(3)])
    database.a.create_index([("secret", "text")])
    database.a.create_index([("place", "2d")])
    database.b.insert_many([{"_id": number, "zero": 0} for number in range(4)])
    file = tmp_path / "signals.txt"
    a, b = f"{database.name}.a", f"{database.name}.b"
    more = {
        "signal.enabled.channels": "file",
        "signal.file": str(file),
        "notification.enabled.channels": "log, table",
        "snapshot.collection.filter.overrides": a,
        f"snapshot.collection.filter.overrides.{a}": REFUSED["divide"],
    }
    found = pipeline(mongodb_uri, lakehouse, database.name, **QUICK, **more)

    def send(id_: str, type_: str, **data: Any) -> None:
        with file.open("a") as out:
            out.write(json.dumps({"id": id_, "type": type_, "data": data}) + "\n")

    first = once(spark, found)
    assert first.snapshot_documents == 4 and first.failed_snapshots.keys() == {a}
    with pytest.raises(errors.CollectionsFailed, match=a):
        refuse_unread(first, is_stopped=False)
    told = by_name(spark, found)
    assert told["b"].snapshot == status.SnapshotStatus(4, True)
    assert told["a"].snapshot is not None and "error" in (told["a"].snapshot.failed or "")

    def ask(id_: str, condition: str, *names: str) -> None:
        conditions = [{"data-collection": a, "filter": condition}]
        send(id_, "execute-snapshot", **{"data-collections": names, "additional-conditions": conditions})

    ask("stopped", REFUSED["where"], a)
    send("stop", "stop-snapshot")
    for name, condition in REFUSED.items():
        ask(name, condition, a, *([b] if name == "text" else []))
    database.a.insert_one({"_id": "streamed", "zero": 1})
    assert once(spark, found).events == 1
    assert file.read_text().strip() == ""
    landed = rows(spark, found)
    check_numbers(landed)
    failed = [plan for plan in plans(landed) if plan["collections"].get(a, {}).get("failed")]
    assert len({plan["id"] for plan in failed}) == 1 + len(REFUSED)
    assert [key for kind, key in snapshots(landed) if kind == "incremental"] == ["0", "1", "2", "3"]
    ended = {id_: event for _, id_, event in notifications(spark, found) if event in ("ABORTED", "COMPLETED")}
    assert {ended[name] for name in ("stopped", *REFUSED)} == {"ABORTED"}
    texts = [*caplog.messages, *(row.payload or "" for row in landed if row.kind != "signal")]
    assert not [text for text in texts if SECRET in text or "RawBSON" in text]
    assert any("the server refuses to read it (error" in text for text in caplog.messages)
    mended = dataclasses.replace(found.source, snapshot_collection_filter_overrides={a: '{"zero": 0}'})
    last = once(spark, dataclasses.replace(found, source=mended))
    assert last.snapshot_documents >= 3
    refuse_unread(last, is_stopped=False)
    assert {row.key for row in rows(spark, found) if row.kind == "snapshot" and row.collection == "a"} == {"0", "1", "2"}


ENDLESS = {"a": 1, "b": 1, "$where": "while (true) {}"}


def test_a_filter_without_an_end_is_given_up(mongo: Any, database: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server evaluates it even to choose between two indexes, while the capture's main thread waits; a chunk has a limit as well."""
    monkeypatch.setattr(snapshot_read, "PLAN_MS", 1000)
    monkeypatch.setattr(snapshot_read, "READ_MS", 1000)
    database.a.insert_many([{"_id": number, "a": 1, "b": 1} for number in range(300)])
    database.a.create_index("a")
    database.a.create_index("b")
    refusal = snapshot_read.refusal_of_filter(mongo, f"{database.name}.a", ENDLESS)
    assert refusal == "it takes more than 1 seconds for a few documents"
    (collection,) = catalog.collections(mongo, [database.name])
    after = mongodb_server.operation_time(mongo)
    with pytest.raises(mongodb_failures.SnapshotExpired):
        list(snapshot_read.read_chunk(mongo, collection, snapshot_read.IdRange(), after=after, condition=ENDLESS))


def test_a_filter_that_is_changed_within_a_snapshot_begins_it_again(
    spark: Any, mongodb_uri: str, database: Any, lakehouse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No document that the new settings include is missing, and no document that the old settings excluded is swept."""
    database.a.insert_many([{"_id": number, "odd": bool(number % 2), "pad": "x" * 1000} for number in range(300)])
    a = f"{database.name}.a"
    overrides = {"snapshot.collection.filter.overrides": a, f"snapshot.collection.filter.overrides.{a}": '{"odd": true}'}
    more = {"commit.max.bytes": 50_000, "snapshot.max.threads": 1}
    commit, count = snapshot.Snapshot._commit, iter(range(1000))

    def dying(self: Any, *arguments: Any) -> None:
        if next(count) == 2:
            raise KeyboardInterrupt
        commit(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(snapshot.Snapshot, "_commit", dying)
        with pytest.raises(KeyboardInterrupt):
            once(spark, pipeline(mongodb_uri, lakehouse, database.name, **more, **overrides))
    whole = pipeline(mongodb_uri, lakehouse, database.name, **more)
    once(spark, whole)
    landed = rows(spark, whole)
    assert {row.key for row in landed if row.kind == "snapshot"} == {str(number) for number in range(300)}
    assert [
        plan["collections"][a]["sweep"] for plan in plans(landed) if plan["collections"].get(a, {}).get("completed")
    ] == [True]


def test_a_gap_stays_open_for_what_was_not_read_again(
    spark: Any,
    mongodb_uri: str,
    database: Any,
    lakehouse: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Collections outside the snapshot's list and collections with a filter are incomplete until a signal reads them completely."""
    for name in ("whole", "filtered", "unlisted", "gone"):
        database[name].insert_many([{"_id": number, "n": number} for number in range(4)])
    first = pipeline(mongodb_uri, lakehouse, database.name)
    once(spark, first)
    database.gone.drop()
    filtered = f"{database.name}.filtered"
    more = {
        "snapshot.mode": "when_needed",
        "snapshot.include.collection.list": f"{database.name}.whole, {filtered}",
        "snapshot.collection.filter.overrides": filtered,
        f"snapshot.collection.filter.overrides.{filtered}": '{"n": 1}',
        "signal.enabled.channels": "file",
        "signal.file": str(lakehouse / "signals"),
    }
    found = pipeline(mongodb_uri, lakehouse, database.name, **QUICK, **more)
    opened = StreamOpener.open

    def lost(self: Any, position: Any) -> Any:
        if position is not None:
            raise errors.PositionLost("lost")
        return opened(self, position)

    with monkeypatch.context() as patched:
        patched.setattr(StreamOpener, "open", lost)
        once(spark, found)
    gaps = {name: each.incomplete_because for name, each in by_name(spark, found).items() if each.incomplete_since}
    assert set(gaps) == {"filtered", "unlisted"}
    assert "filter" in str(gaps["filtered"]) and "no snapshot" in str(gaps["unlisted"])
    assert any(
        f"--data-collections {filtered} --data-collections {database.name}.unlisted" in each for each in caplog.messages
    )
    asked = {"data-collections": [filtered, f"{database.name}.unlisted"]}
    (lakehouse / "signals").write_text(json.dumps({"id": "all", "type": "execute-snapshot", "data": asked}) + "\n")
    once(spark, found)
    assert {each.incomplete_since for each in by_name(spark, found).values()} == {None}


def test_a_collection_that_was_left_out_for_a_while_is_incomplete(
    spark: Any, mongodb_uri: str, database: Any, lakehouse: Path
) -> None:
    """Its changes meanwhile are lost, which status shows as soon as it is captured again: whether lists or scope excluded it, whether
    it existed at the first change of the settings or was created later.

    A collection that was dropped meanwhile has nothing to read, and all of its rows are removed.
    """
    alone = {
        "lists": {"collection.include.list": f"{database.name}.a"},
        "scope": {"capture.scope": "collection", "capture.target": f"{database.name}.a"},
    }
    every = pipeline(mongodb_uri, lakehouse, database.name)
    for name in ("a", "b", "dropped"):
        database[name].insert_one({"_id": 1})
    once(spark, every)
    # The settings are changed once before `made` exists.
    changed = {"capture.mode.full.update.type": "post_image"}
    once(spark, pipeline(mongodb_uri, lakehouse, database.name, **changed))
    database.made.insert_one({"_id": 1})
    once(spark, pipeline(mongodb_uri, lakehouse, database.name, **changed))
    once(spark, pipeline(mongodb_uri, lakehouse, database.name, **alone["lists"]))
    once(spark, pipeline(mongodb_uri, lakehouse, database.name, **alone["scope"]))
    for name in ("b", "made"):
        database[name].insert_one({"_id": 2})
    database.dropped.drop()
    once(spark, every)
    incomplete = {name: each for name, each in by_name(spark, every).items() if each.incomplete_since}
    assert set(incomplete) == {"b", "made"}
    landed = rows(spark, every)
    check_numbers(landed)
    (gone,) = [each for plan in plans(landed) for name, each in plan["collections"].items() if each.get("gone")]
    assert gone["completed"] and gone["sweep"] and gone["first"]
    assert [each for each in plans(landed) if each.get("planned") == [f"{database.name}.dropped"]]
    once(spark, every)
    assert len(rows(spark, every)) == len(landed)


def test_a_start_that_takes_no_snapshot_says_why(
    spark: Any, mongodb_uri: str, database: Any, lakehouse: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If the mode changes from no_data to initial there is a position: as with Debezium no snapshot is taken, and one line says so."""
    database.a.insert_one({"_id": 1})
    once(spark, pipeline(mongodb_uri, lakehouse, database.name, **{"snapshot.mode": "no_data"}))
    for mode in ("initial", "when_needed"):
        caplog.clear()
        assert (
            once(spark, pipeline(mongodb_uri, lakehouse, database.name, **{"snapshot.mode": mode})).snapshot_documents == 0
        )
        assert len([each for each in caplog.messages if f"snapshot.mode: {mode} takes no snapshot" in each]) == 1


def test_a_start_time_that_the_oplog_lost_is_no_end_where_a_snapshot_is_taken(
    spark: Any, mongodb_uri: str, database: Any, lakehouse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`when_needed` begins at the current time with a snapshot; other modes name the setting and change nothing."""
    database.a.insert_one({"_id": 1})
    probe = change_stream.ChangeStream.probe

    def lost(self: change_stream.ChangeStream) -> None:
        if self.start.at == Timestamp(1, 1):
            raise mongodb_failures.HistoryLost(mongodb_failures.CHANGE_STREAM_HISTORY_LOST)
        probe(self)

    monkeypatch.setattr(change_stream.ChangeStream, "probe", lost)
    early = {"capture.start.op.time": (1 << 32) + 1}
    with pytest.raises(errors.PositionLost, match="capture.start.op.time"):
        once(spark, pipeline(mongodb_uri, lakehouse, database.name, **early))
    found = pipeline(mongodb_uri, lakehouse, database.name, **early, **{"snapshot.mode": "when_needed"})
    assert once(spark, found).snapshot_documents == 1
    assert bronze.newest(spark, table(found)).batch > 0
