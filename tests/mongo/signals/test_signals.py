"""Signals with a real server and real tables: ad hoc snapshots through each channel, stopped, paused and killed."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from jobs import command_line
from pipelines.bronze import log as bronze
from pipelines.delta import tables as delta
from pipelines.snapshot import snapshot
from tests.harness import oracle
from tests.harness.captures import (
    QUICK,
    Running,
    check_numbers,
    done,
    notifications,
    once,
    pipeline,
    plans,
    rows,
    signals,
    snapshots,
    until,
)


@pytest.mark.parametrize("skipped", ["t", "c"])
def test_a_document_of_the_signal_collection_asks_for_a_snapshot(
    spark: Any, mongodb_uri: str, database: Any, lakehouse: Path, skipped: str
) -> None:
    """A filtered snapshot runs beside the stream. The signal is a row of its own and its collection has no table. This also works if
    inserts are skipped.
    """
    database.orders.insert_many([{"_id": number, "state": "new" if number % 2 else "old"} for number in range(10)])
    more = {
        "collection.include.list": f"{database.name}.orders",
        "signal.data.collection": f"{database.name}.signals",
        "notification.enabled.channels": "log, table",
        "skipped.operations": skipped,
    }
    found = pipeline(mongodb_uri, lakehouse, database.name, **QUICK, **more)
    condition = {"data-collection": f"{database.name}.orders", "filter": '{"state": "new"}'}
    with Running(spark, found):
        until(lambda: delta.exists(spark, delta.layout(found.lakehouse).bronze("shop")) and len(rows(spark, found)) > 10)
        data = {"data-collections": [f"{database.name}\\.ord.*"], "additional-conditions": [condition]}
        database.signals.insert_one({"_id": "one", "type": "execute-snapshot", "data": data})
        until(lambda: done(spark, found, "one"))
    landed = rows(spark, found)
    check_numbers(landed)
    assert [(each["id"], each["type"], each["channel"]) for each in signals(landed)] == [
        ("one", "execute-snapshot", "source")
    ]
    incremental = [key for kind, key in snapshots(landed) if kind == "incremental"]
    assert incremental == ["1", "3", "5", "7", "9"]
    assert {row.collection for row in landed if row.kind == "change"} == set()
    state = [plan for plan in plans(landed) if plan.get("collections", {}).get(f"{database.name}.orders")][-1]
    assert state["collections"][f"{database.name}.orders"]["sweep"] is False
    told = [(type_, event) for type_, id_, event in notifications(spark, found) if id_ == "one"]
    assert told == [
        ("Incremental Snapshot", event) for event in ("STARTED", "IN_PROGRESS", "TABLE_SCAN_COMPLETED", "COMPLETED")
    ]
    noted = oracle.read(delta.layout(found.lakehouse).ops("notifications").path or "").to_pylist()
    [progress] = [dict(each["additional_data"]) for each in noted if (each["id"], each["type"]) == ("one", "IN_PROGRESS")]
    assert (progress["last_processed_key"], progress["maximum_key"]) == ("9", "9")


def test_the_command_sends_a_signal_that_the_next_start_finds(
    spark: Any, mongodb_uri: str, database: Any, lakehouse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`medallion signal` writes `ops/signals`; the signal is handled once, however often the capture is started."""
    database.orders.insert_many([{"_id": number} for number in range(4)])
    found = pipeline(mongodb_uri, lakehouse, database.name, **{"snapshot.mode": "no_data"})
    once(spark, found)
    file = tmp_path / "shop.yml"
    file.write_text(
        f"name: shop\nlakehouse: {{root: {lakehouse}}}\nsource:\n"
        f"  mongodb.connection.string: {mongodb_uri}\n  database.include.list: {database.name}\n"
    )
    monkeypatch.setattr("pipelines.spark.session.session", lambda *_, **__: spark)
    monkeypatch.setattr("jobs.log_lines.configure", lambda **_: None)  # would change the logging of this process
    sent = CliRunner().invoke(
        command_line.medallion,
        [
            "signal",
            "execute-snapshot",
            "--config",
            str(file),
            "--data-collections",
            f"{database.name}.orders",
            "--id",
            "again",
        ],
        catch_exceptions=False,
    )
    assert (
        sent.output
        == "signal again (execute-snapshot) sent; the capture of shop handles it at its next poll, or when it starts\n"
    )
    assert once(spark, found).snapshot_documents == 4
    assert once(spark, found).snapshot_documents == 0
    landed = rows(spark, found)
    check_numbers(landed)
    assert [each["id"] for each in signals(landed)] == ["again"]
    assert snapshots(landed) == [("incremental", str(number)) for number in range(4)]


def test_a_file_of_signals_is_read_and_emptied(
    spark: Any, mongodb_uri: str, database: Any, lakehouse: Path, tmp_path: Path
) -> None:
    """A blocking snapshot is requested by file. Unreadable lines and signals that cannot be handled do not end the capture."""
    database.orders.insert_many([{"_id": number} for number in range(3)])
    file = tmp_path / "signals.txt"
    asked = {
        "id": "b",
        "type": "execute-snapshot",
        "data": {"data-collections": [f"{database.name}.orders"], "type": "BLOCKING"},
    }
    unknown = {"id": "u", "type": "execute-snapshots", "data": {}}
    file.write_text(f"{json.dumps(asked)}\nno json\n{json.dumps(unknown)}\n")
    more = {"signal.enabled.channels": "file", "signal.file": str(file), "snapshot.mode": "no_data"}
    found = pipeline(mongodb_uri, lakehouse, database.name, **QUICK, **more)
    assert once(spark, found).snapshot_documents == 3
    landed = rows(spark, found)
    assert [key for _, key in snapshots(landed)] == ["0", "1", "2"]
    refused = {each["id"]: each.get("refused") for each in signals(landed)}
    assert refused["b"] is None
    assert "execute-snapshot" in refused["u"]
    assert file.read_text() == ""


def test_signals_that_come_together(spark: Any, mongodb_uri: str, database: Any, lakehouse: Path, tmp_path: Path) -> None:
    """A signal with a filter that the server refuses is refused. A stop right after its snapshot stops it. A pause does not keep a run
    with `once` from ending.
    """
    for name in ("orders", "stock"):
        database[name].insert_many([{"_id": number} for number in range(3)])
    file = tmp_path / "signals.txt"
    more = {"signal.enabled.channels": "file", "signal.file": str(file), "snapshot.mode": "no_data"}
    found = pipeline(mongodb_uri, lakehouse, database.name, **QUICK, **more)
    orders, stock = f"{database.name}.orders", f"{database.name}.stock"

    def send(type_: str, id_: str, **data: Any) -> None:
        with file.open("a") as out:
            out.write(json.dumps({"id": id_, "type": type_, "data": data}) + "\n")

    bad = [{"data-collection": orders, "filter": '{"age": {"$gte ": 5}}'}]
    send("execute-snapshot", "bad", **{"data-collections": [orders], "additional-conditions": bad})
    send("execute-snapshot", "stopped", **{"data-collections": [orders]})
    send("stop-snapshot", "stop", **{"data-collections": [orders]})
    assert once(spark, found).snapshot_documents == 0
    refused = {each["id"]: each.get("refused", "") for each in signals(rows(spark, found))}
    assert "unknown operator" in refused["bad"] and refused["stopped"] == refused["stop"] == ""
    assert done(spark, found, "stopped")

    send("execute-snapshot", "paused", **{"data-collections": [orders]})
    send("pause-snapshot", "pause")
    send("execute-snapshot", "behind", **{"data-collections": [stock]})
    assert once(spark, found).snapshot_documents == 0
    send("resume-snapshot", "resume")
    once(spark, found)
    assert sorted(key for _, key in snapshots(rows(spark, found))) == ["0", "0", "1", "1", "2", "2"]
    check_numbers(rows(spark, found))


@pytest.mark.journey
def test_a_snapshot_that_was_paused_and_killed_goes_on_and_can_be_stopped(
    spark: Any, mongodb_uri: str, database: Any, lakehouse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A paused snapshot stays paused over a restart; a resumed one continues after its last chunk; a stopped one ends."""
    database.orders.insert_many([{"_id": number} for number in range(24)])
    database.stock.insert_many([{"_id": number} for number in range(5)])
    file = tmp_path / "signals.txt"
    more = {
        "signal.enabled.channels": "file",
        "signal.file": str(file),
        "snapshot.mode": "no_data",
        "incremental.snapshot.chunk.size": 4,
        "snapshot.max.threads": 1,
    }
    found = pipeline(mongodb_uri, lakehouse, database.name, **QUICK, **more)

    def send(type_: str, **data: Any) -> None:
        with file.open("a") as out:
            out.write(json.dumps({"id": type_, "type": type_, "data": data}) + "\n")

    reached, gate = threading.Event(), threading.Event()
    commit = snapshot.Snapshot._commit

    def gated(self: Any, *arguments: Any) -> None:
        commit(self, *arguments)
        reached.set()
        assert gate.wait(120)

    def until_heard(type_: str) -> None:
        until(lambda: any(each["type"] == type_ for each in signals(rows(spark, found))))
        gate.set()

    monkeypatch.setattr(snapshot.Snapshot, "_commit", gated)
    send("execute-snapshot", **{"data-collections": [f"{database.name}\\..*"]})
    with Running(spark, found):
        assert reached.wait(60)
        send("pause-snapshot")
        until_heard("pause-snapshot")
    read = len(snapshots(rows(spark, found)))
    assert 4 <= read < 24
    assert once(spark, found).snapshot_documents == 0
    assert len(snapshots(rows(spark, found))) == read
    send("resume-snapshot")
    gate.clear()
    reached.clear()
    with Running(spark, found):
        assert reached.wait(60)
        send("stop-snapshot", **{"data-collections": [f"{database.name}.stock"]})
        until_heard("stop-snapshot")
        until(lambda: any(plan.get("done") for plan in plans(rows(spark, found))))
    landed = rows(spark, found)
    check_numbers(landed)
    keys = [(row.collection, int(row.key)) for row in landed if row.kind == "snapshot"]
    assert sorted(keys) == [("orders", number) for number in range(24)]
    assert once(spark, found).snapshot_documents == 0


def test_a_capture_killed_in_an_incremental_snapshot_goes_on(
    spark: Any, mongodb_uri: str, database: Any, lakehouse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart continues from the chunks of the killed process: none is lost and none is repeated."""
    database.orders.insert_many([{"_id": number} for number in range(20)])
    database.signals.drop()
    more = {
        "collection.include.list": f"{database.name}.orders",
        "signal.data.collection": f"{database.name}.signals",
        "incremental.snapshot.chunk.size": 3,
    }
    found = pipeline(mongodb_uri, lakehouse, database.name, **QUICK, **more)
    once(spark, found)
    database.signals.insert_one(
        {"_id": "x", "type": "execute-snapshot", "payload": json.dumps({"data-collections": [f"{database.name}.orders"]})}
    )
    commit, count = snapshot.Snapshot._commit, iter(range(100))

    def dying(self: Any, *arguments: Any) -> None:
        if next(count) == 3:
            raise KeyboardInterrupt
        commit(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(snapshot.Snapshot, "_commit", dying)
        with pytest.raises(KeyboardInterrupt):
            once(spark, found)
    partly = [key for kind, key in snapshots(rows(spark, found)) if kind == "incremental"]
    assert len(partly) == 9
    once(spark, found)
    landed = rows(spark, found)
    check_numbers(landed)
    assert sorted(int(key) for kind, key in snapshots(landed) if kind == "incremental") == list(range(20))
    assert bronze.handled_signals(spark, delta.layout(found.lakehouse).bronze("shop")) == set()
    assert once(spark, found).snapshot_documents == 0
