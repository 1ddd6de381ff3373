"""A starting capture knows moves to another shard of which bronze has only one event."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import bson
import pyarrow as pa
import pytest
from bson.binary import Binary
from bson.int64 import Int64
from bson.timestamp import Timestamp

from cdc_core.bronze import event_rows as events
from cdc_core.stream import fields as field_filters
from cdc_core.stream import transactions
from cdc_core.tables import layout as tables
from pipelines.bronze import batch_rows, shard_moves
from pipelines.bronze import log as bronze_log
from pipelines.capture import capture
from pipelines.mongodb import server as mongodb_server

TOKEN = "82{:08X}{:08X}2B022C01002{}6E5A1004421E9C2BE69342E885031C52C7B7562746645F696400646B0136FAF9C3DA20B05111340004"
TABLE = tables.TableRef("delta.`/none`", "/none")
POSITION = bronze_log.BronzePosition("82", 1, 3)
SPARK: Any = None


def event(operation: str, region: int, *, at: int, index: str = "9") -> bytes:
    """One event of a transaction that changes the shard key `region` of a document."""
    document = {"_id": 7, "region": region}
    fields: dict[str, Any] = {
        "_id": {"_data": TOKEN.format(1_700_000_000, at, index)},
        "operationType": operation,
        "clusterTime": Timestamp(1_700_000_000, at),
        "ns": {"db": "shop", "coll": "orders"},
        "documentKey": document,
        "lsid": {"id": Binary(b"s" * 16, 4)},
        "txnNumber": Int64(1),
    }
    return bson.encode(fields | ({} if operation == "delete" else {"fullDocument": document}))


def landed(moves: transactions.ShardMoves, *raw: bytes) -> pa.Table:
    rows = events.EventRows("test")
    for each in raw:
        rows.add(each, moves=moves)
    return rows.table(batch=1, first_offset=0, ts_ms=0)


STEPS = {
    "the delete comes last": [event("insert", 1, at=1), event("delete", 900, at=2)],
    "both at one time": [event("delete", 900, at=1, index="B06"), event("insert", 1, at=1)],
    "an update follows": [
        event("delete", 900, at=1, index="B06"),
        event("insert", 1, at=1),
        event("update", 1, at=1, index="B02"),
        event("update", 1, at=1, index="B04"),
    ],
}


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_a_start_between_the_events_of_a_move_changes_nothing(steps: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the start is, the sequences are those of a capture without a restart."""
    expected = landed(transactions.ShardMoves(), *steps)["sequence"].to_pylist()
    for cut in range(len(steps) + 1):
        before = landed(transactions.ShardMoves(), *steps[:cut])

        def few_rows(*_: object, before: pa.Table = before, **__: object) -> pa.Table:
            return before.select(shard_moves._COLUMNS)

        monkeypatch.setattr(batch_rows, "few_rows", few_rows)
        after = landed(shard_moves.remembered(SPARK, TABLE, POSITION), *steps[cut:])
        assert [*before["sequence"].to_pylist(), *after["sequence"].to_pylist()] == expected


def test_a_delete_has_no_excluded_or_renamed_field_of_the_shard_key() -> None:
    """With `rewrite` its key may become a row. Moves are known all the same."""
    region, rename = ("region",), field_filters.Rename(("region",), "area")
    for rules, gives in (({"excluded": (region,)}, '{"_id":7}'), ({"renamed": (rename,)}, '{"_id":7,"area":900}')):
        filtered, moves = events.EventRows("test"), transactions.ShardMoves()
        for each in STEPS["the delete comes last"]:
            filtered.add(each, moves=moves, fields=lambda *_, rules=rules: field_filters.FieldRules(**rules))
        rows = filtered.table(batch=1, first_offset=0, ts_ms=0)
        assert rows["documentKey"].to_pylist() == ['{"_id":7,"region":1}', gives]
        assert rows["sequence"] == landed(transactions.ShardMoves(), *STEPS["the delete comes last"])["sequence"]


def test_a_delete_has_no_excluded_or_renamed_path_of_the_shard_key() -> None:
    """Of the shard key `{"at.region": 1}` a `documentKey` has one field, `at.region`."""
    path = ("at", "region")
    rename = field_filters.Rename(path, "area")
    raw = bson.decode(event("delete", 1, at=1)) | {"documentKey": {"at.region": 900, "_id": {"at": 7}}}
    for rules, gives in (
        ({"excluded": (path,)}, '{"_id":{"at":7}}'),
        ({"excluded": (path, ("_id",))}, '{"_id":{"at":7}}'),
        ({"renamed": (rename,)}, '{"_id":{"at":7},"at":{"area":900}}'),
    ):
        rows = events.EventRows("test")
        rows.add(bson.encode(raw), fields=lambda *_, rules=rules: field_filters.FieldRules(**rules))
        assert rows.table(batch=1, first_offset=0, ts_ms=0)["documentKey"].to_pylist() == [gives]


def test_a_deletes_paths_of_the_shard_key_are_no_names() -> None:
    """Without a pre-image `rewrite` takes the document from this key: its row must not get a column `at.region` beside `at`."""
    keys: list[tuple[dict[str, Any], str]] = [
        ({"at.region": 900, "at.zone.x": "z", "_id": 7}, '{"at":{"region":900,"zone":{"x":"z"}},"_id":7}'),
        ({"_id.a": 1, "b": 2, "_id": {"a": 1, "c.d": 3}}, '{"b":2,"_id":{"a":1,"c.d":3}}'),
        ({"a": {"b": 1}, "a.b": 1, "_id": 7}, '{"a":{"b":1},"_id":7}'),
        ({"a": Int64(5), "a.b": None, "a.b.c": 1, "_id": 7}, '{"a":{"$numberLong":"5"},"_id":7}'),
    ]
    for key, gives in keys:
        rows = events.EventRows("test")
        rows.add(bson.encode(bson.decode(event("delete", 1, at=1)) | {"documentKey": key}))
        assert rows.table(batch=1, first_offset=0, ts_ms=0)["documentKey"].to_pylist() == [gives]


def test_rows_outside_of_transactions_are_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an empty bronze nothing is read."""
    raw = bson.decode(event("insert", 1, at=1))
    del raw["lsid"], raw["txnNumber"]
    rows = landed(transactions.ShardMoves(), bson.encode(raw))
    heartbeat = bronze_log.heartbeat_row({"beat": 1}, token="82", batch=1, offset=1, ts_ms=0)
    held = pa.concat_tables([rows, heartbeat]).select(shard_moves._COLUMNS)
    monkeypatch.setattr(batch_rows, "few_rows", lambda *_, **__: held)
    assert len(shard_moves.remembered(SPARK, TABLE, POSITION)) == 0
    assert len(shard_moves.remembered(SPARK, TABLE, None)) == 0


def test_a_replica_set_has_no_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a replica set nothing is remembered or read."""
    found = transactions.ShardMoves()
    monkeypatch.setattr(shard_moves, "remembered", lambda *_: found)
    source = SimpleNamespace(provide_transaction_metadata=False, max_batch_size=1, commit_max_bytes=1)
    service = SimpleNamespace(spark=SPARK, settings=SimpleNamespace(name="shop"))
    of_a_run: Any = SimpleNamespace(
        _deployment=SimpleNamespace(source=source, client=None), _service=service, _selection=None
    )
    log: Any = SimpleNamespace(table=TABLE, position=POSITION)
    for is_sharded, moves in ((True, found), (False, None)):
        info = mongodb_server.ServerInfo((8, 0, 0), is_sharded)
        monkeypatch.setattr(mongodb_server, "server_info", lambda _, info=info: info)
        assert capture.Capture._encoder(of_a_run, log).moves is moves
