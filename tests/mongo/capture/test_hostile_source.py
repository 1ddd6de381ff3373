"""Data and events of a server that a driver does not expect: stream and snapshot continue and report them."""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import bson
import pytest
from bson.raw_bson import DEFAULT_RAW_BSON_OPTIONS, RawBSONDocument

from cdc_core import errors
from cdc_core.settings import parse
from pipelines.mongodb import catalog, change_stream, cursor_reply, document_keys, snapshot_read
from pipelines.mongodb import client as mongodb
from pipelines.mongodb import connection as connections
from pipelines.mongodb import failures as mongodb_failures
from pipelines.mongodb import server as mongodb_server
from tests.harness.captured import Stream, snapshot_rows


def settings(uri: str, **source: Any) -> parse.Settings:
    given = {"mongodb.connection.string": uri, **source}
    return parse.parse({"name": "shop", "lakehouse": {"root": "lake"}, "source": given})


@contextlib.contextmanager
def stream(mongo: Any, found: parse.Settings) -> Iterator[Stream]:
    with contextlib.closing(Stream(found, mongo, mongodb_server.operation_time(mongo))) as opened:
        yield opened


def changes(opened: Stream, mongo: Any) -> list[dict[str, Any]]:
    opened.read(mongodb_server.operation_time(mongo))
    return [row for row in opened.table if row["kind"] == "change"]


# --- names in another case ---


def test_a_database_that_is_made_later_in_another_case(mongodb_uri: str, mongo: Any, database: Any) -> None:
    """Lists ignore case, also if the database does not exist yet, and if it is dropped and created again."""
    name = database.name
    found = settings(mongodb_uri, **{"collection.include.list": f"{name.upper()}.ORDERS"})
    with stream(mongo, found) as opened:
        database.orders.insert_many([{"_id": number} for number in range(5)])
        assert [row["key"] for row in changes(opened, mongo)] == list("01234")
    with stream(mongo, found) as opened:
        database.orders.insert_one({"_id": 5})
        opened.read(mongodb_server.operation_time(mongo))
        mongo.drop_database(name)
        anew = mongo[name.replace("test", "Test")]
        try:
            anew.Orders.insert_one({"_id": 6})
            landed = changes(opened, mongo)[-2:]
            assert [(row["db"], row["collection"], row["key"]) for row in landed] == [
                (name, "orders", "5"),
                (anew.name, "Orders", "6"),
            ]
        finally:
            mongo.drop_database(anew.name)


@pytest.mark.parametrize("is_killed", [False, True])
@pytest.mark.parametrize("is_there_again", [False, True])
def test_a_database_that_is_dropped_under_a_running_capture(
    mongodb_uri: str, mongo: Any, database: Any, is_killed: bool, is_there_again: bool
) -> None:
    """The stream waits for the database in the whole deployment, and reads its documents when it is created again. This holds if the
    server forgets the waiting stream before its position has moved, and if the next stream is of the database again.
    """
    name = database.name
    found = settings(mongodb_uri, **{"collection.include.list": f"{name}.a,{name}.b"})
    database.a.insert_one({"_id": 0})
    with stream(mongo, found) as opened:
        database.a.insert_one({"_id": 1})
        assert changes(opened, mongo)[-1]["key"] == "1"
        before = mongodb_server.operation_time(mongo)
        mongo.drop_database(name)
        while opened._stream.options.db is not None:
            opened.read(before)
        if is_killed:
            opened._stream.close()
        if not is_there_again:
            opened.read(mongodb_server.operation_time(mongo))
        database.b.insert_one({"_id": 2})
        assert changes(opened, mongo)[-1]["key"] == "2"


# --- documents that the driver cannot read ---


def document(*elements: bytes) -> bytes:
    body = b"".join(elements)
    return (len(body) + 5).to_bytes(4, "little") + body + b"\0"


def text(content: bytes) -> bytes:
    return (len(content) + 1).to_bytes(4, "little") + content + b"\0"


ODD = {
    "binary of subtype 2 with a wrong inner length": b"\x05a\0" + (4).to_bytes(4, "little") + b"\x02\xff\xff\0\0",
    "text that is no UTF-8": b"\x02a\0" + text(b"\xff\xfe"),
    "a name that is no UTF-8": b"\x10\xff\xfe\0\1\0\0\0",
    "a code that is no UTF-8": b"\x0da\0" + text(b"\xff"),
    "options of a regular expression that are no UTF-8": b"\x0ba\0x\0\xff\0",
    "a reference to no collection": b"\x03a\0" + document(b"\x10$ref\0\1\0\0\0", b"\x10$id\0\1\0\0\0"),
}
BROKEN_IDS = [b"\x02_id\0" + text(content) for content in (b"\xff", b"\xfe", b"a\xff", b"a\xfe")]


def test_documents_that_the_driver_refuses_land_with_their_bytes(mongodb_uri: str, mongo: Any, database: Any) -> None:
    """BSON that mongod stores and pymongo cannot read: each document is its own row, in streams and snapshots."""
    found = settings(mongodb_uri, **{"database.include.list": database.name})
    begins = mongodb_server.operation_time(mongo)
    ids = [b"\x10_id\0" + number.to_bytes(4, "little") for number in range(len(ODD))]
    given = [document(each, odd) for each, odd in zip(ids, ODD.values(), strict=True)]
    given += [document(each, b"\x10v\0\1\0\0\0") for each in BROKEN_IDS]
    with stream(mongo, found) as opened:
        for raw in given:
            database.orders.insert_one(RawBSONDocument(raw))
        query = document(
            b"\x03q\0" + document(BROKEN_IDS[0]),
            b"\x03u\0" + document(b"\x03$set\0" + document(ODD["text that is no UTF-8"])),
        )
        database.command({"update": "orders", "updates": [RawBSONDocument(query)]})
        query = document(b"\x03q\0" + document(BROKEN_IDS[1]), b"\x10limit\0\1\0\0\0")
        database.command({"delete": "orders", "deletes": [RawBSONDocument(query)]})
        landed = changes(opened, mongo)
    inserted = [row for row in landed if row["op"] == "c"]
    assert len({row["key"] for row in inserted}) == len(inserted) == len(given)
    assert [landed[-2]["op"], landed[-1]["op"], landed[-1]["key"]] == ["u", "d", inserted[len(ODD) + 1]["key"]]
    for row, raw in zip(inserted, given, strict=True):
        assert isinstance(json.loads(row["after"]), dict)
        if row["payload"] is not None:
            assert raw[4:-1] in base64.b64decode(json.loads(row["payload"])["bson"])
    assert sum(row["payload"] is not None for row in inserted) == len(given) - 1
    rows = snapshot_rows(found, mongo, after=begins)
    assert sorted(row["key"] for row in rows) == sorted({row["key"] for row in inserted} - {landed[-1]["key"]})
    assert sum(row["payload"] is not None for row in rows) == len(given) - 2


def test_fields_that_are_left_out_are_in_no_original(mongodb_uri: str, mongo: Any, database: Any) -> None:
    """If a document contains text that is not UTF-8, its original bytes are stored only if no fields of its collection are excluded or
    renamed.
    """
    database.command({"create": "users", "changeStreamPreAndPostImages": {"enabled": True}})
    lists = {"field.exclude.list": f"{database.name}.users.ssn", "field.renames": f"{database.name}.users.old:new"}
    mode = {"capture.mode": "change_streams_update_full_with_pre_image"}
    found = settings(mongodb_uri, **{"database.include.list": database.name, **lists, **mode})
    broken, other = (
        b"\x02note\0" + text(note) + b"\x02old\0" + text(b"o") + b"\x02ssn\0" + text(ssn)
        for note, ssn in ((b"\xff\xfe", b"123-45-6789"), (b"\xfe\xff", b"555-00-1111"))
    )
    begins = mongodb_server.operation_time(mongo)
    with stream(mongo, found) as opened:
        for name in ("users", "others"):
            database[name].insert_one(RawBSONDocument(document(b"\x10_id\0\1\0\0\0", broken)))
            given = document(b"\x03q\0" + document(), b"\x03u\0" + document(b"\x03$set\0" + document(other)))
            database.command({"update": name, "updates": [RawBSONDocument(given)]})
        database.users.update_one({"_id": 1}, {"$set": {"ssn": "987-65-4321"}})
        landed = changes(opened, mongo)
    landed += snapshot_rows(found, mongo, after=begins)
    of_users = [row for row in landed if row["collection"] == "users"]
    of_others = [row for row in landed if row["collection"] == "others"]
    assert [row["op"] for row in of_users] == ["c", "u", "u", "r"] and {row["payload"] for row in of_users} == {
        '{"bson":null}'
    }
    secrets = ("123-45", "555-00", "987-65", '"old"')
    assert not [row for row in of_users if any(secret in str(row) for secret in secrets)]
    originals = [base64.b64decode(json.loads(row["payload"])["bson"]) for row in of_others]
    assert [row["op"] for row in of_others] == ["c", "u", "r"]
    assert b"123-45-6789" in originals[0] and all(b"555-00-1111" in each for each in originals[1:])


def test_chunks_end_and_begin_at_any_id(mongo: Any, database: Any) -> None:
    """Chunk boundaries are bytes: an `_id` that cannot be decoded may be a boundary."""
    kinds = [b"\x0d_id\0" + text(b"code"), b"\x0e_id\0" + text(b"symbol"), b"\x05_id\0\4\0\0\0\2\xff\xff\0\0", b"\x7f_id\0"]
    given = [document(each) for each in (*BROKEN_IDS, *kinds, b"\x12_id\0" + (2**40).to_bytes(8, "little"))]
    for raw in given:
        database.orders.insert_one(RawBSONDocument(raw))
    collection, after = catalog.collections(mongo, [database.name])[0], mongodb_server.operation_time(mongo)
    seen: list[bytes] = []
    lo: bytes | None = None
    while len(seen) <= len(given):
        hi = snapshot_read.boundary(mongo, collection, lo=lo, documents=1)
        for chunk in snapshot_read.read_chunk(mongo, collection, snapshot_read.IdRange(lo, hi), after=after):
            seen += chunk.documents
        if hi is None:
            break
        lo = snapshot_read.hi_as_lo(hi)
    every = database.get_collection("orders", codec_options=DEFAULT_RAW_BSON_OPTIONS).find(sort=[("_id", 1)])
    assert seen == [each.raw for each in every]
    assert len(seen) == len(given)


# --- collections for which the driver has no object ---

NAMES = ("a..b", "a.", " a", "a'b", "a/b", "a\nb", "-", "*", "\u202e")


def test_collections_of_every_name_are_read(mongodb_uri: str, mongo: Any, database: Any) -> None:
    """MongoDB allows names that the driver's `Collection` refuses (`a..b`, `a.`). Such collections are measured, planned, read and
    followed like others, and a stream of one of them holds a position.
    """
    names = [f"{database.name}.{name}" for name in NAMES]
    found = settings(mongodb_uri, **{"filters.match.mode": "literal", "collection.include.list": names})
    with stream(mongo, found) as opened:
        for name in NAMES:
            database.command({"insert": name, "documents": [{"_id": 1}, {"_id": 2}]})
        assert [row["collection"] for row in changes(opened, mongo)] == [name for name in NAMES for _ in range(2)]
    for each in catalog.collections(mongo, [database.name]):
        assert catalog.size(mongo, each).documents == 2
        assert snapshot_read.boundary(mongo, each, lo=None, documents=1) is not None
        now = mongodb_server.operation_time(mongo)
        assert len(snapshot_read.existing_ids(mongo, each, {"_id": 1}, after=now)) == 1
        assert len(document_keys.sampled_ids(mongo, each, documents=1)) == 1
        assert snapshot_read.refusal_of_filter(mongo, each.namespace, {"a": 1}) is None
    rows = snapshot_rows(found, mongo, after=mongodb_server.operation_time(mongo))
    assert sorted(row["collection"] for row in rows) == sorted([*NAMES, *NAMES])
    alone = settings(mongodb_uri, **{"capture.scope": "collection", "capture.target": f"{database.name}.a..b"})
    with stream(mongo, alone) as opened:
        database.command({"insert": "a..b", "documents": [{"_id": 3}]})
        token = changes(opened, mongo)[-1]["resume_token"]
        assert opened._stream.holds(token)
    # And only this collection is read: no events of the others would follow.
    rows = snapshot_rows(alone, mongo, after=mongodb_server.operation_time(mongo))
    assert [row["collection"] for row in rows] == ["a..b"] * 3


def test_a_view_in_the_place_of_a_named_collection(mongodb_uri: str, mongo: Any, database: Any) -> None:
    """A view is refused when a capture begins. A running capture continues with the other collections, also if a signal names them."""
    lists = {"collection.include.list": f"{database.name}.a, {database.name}.b"}
    found = settings(mongodb_uri, **lists, **{"signal.data.collection": f"{database.name}.signals"})
    for name in ("a", "b"):
        database[name].insert_one({"_id": 1})
    with stream(mongo, found) as opened:
        database.b.drop()
        database.create_collection("b", viewOn="a", pipeline=[])
        data = {"data-collections": [f"{database.name}.a"]}
        database.signals.insert_one({"_id": "s", "type": "execute-snapshot", "data": data})
        opened.read(mongodb_server.operation_time(mongo))
        plans = [json.loads(row["payload"])["snapshot"]["planned"] for row in opened.table if row["kind"] == "heartbeat"]
        assert plans == [[f"{database.name}.a"]]
    with pytest.raises(errors.SourceUnsuitable, match="b is a view"):
        connections.captured(found.source, mongo)


# --- events that are too large ---


def test_an_event_whose_parts_are_too_large_together(mongodb_uri: str, mongo: Any, database: Any) -> None:
    """With `cursor.oversize.handling.mode: skip` an event with 9 MB of document and 9 MB of changed fields, which a server cannot send,
    is reported, and the stream continues. Otherwise the events before it are read, and the error names the setting.
    """
    given = {"database.include.list": database.name, "capture.mode": "change_streams_update_full"}
    skips = {"cursor.oversize.handling.mode": "skip", "cursor.oversize.skip.threshold": 16_777_216}
    with (
        stream(mongo, settings(mongodb_uri, **given, **skips)) as opened,
        stream(mongo, settings(mongodb_uri, **given)) as failing,
    ):
        database.orders.insert_one({"_id": 1})
        database.orders.update_one({"_id": 1}, {"$set": {"pad": "x" * 9_000_000}})
        database.orders.update_one({"_id": 1}, {"$unset": {"pad": 1}})
        landed = changes(opened, mongo)
        # The update's look-up finds the document without its pad: the event is only large if the look-up comes earlier.
        assert len(landed) == 3
        database.orders.insert_many([{"_id": 2}, {"_id": 3, "a": 1}])
        database.orders.update_one({"_id": 3}, {"$set": {"pad": "x" * 9_000_000}})
        database.orders.insert_one({"_id": 4})
        landed = changes(opened, mongo)[3:]
        assert [(row["op"], row["key"]) for row in landed] == [("c", "2"), ("c", "3"), ("c", "4")]
        noted = [json.loads(row["payload"]) for row in opened.table if row["kind"] == "notification"]
        assert [each["additional_data"]["key"] for each in noted] == ["3"]
        with pytest.raises(errors.SourceUnsuitable, match="10334"):
            failing.read(mongodb_server.operation_time(mongo))
        before = [(row["op"], row["key"]) for row in failing.table if row["kind"] == "change"]
        assert before == [("c", "1"), ("u", "1"), ("u", "1"), ("c", "2"), ("c", "3")]


# --- kills by an operator ---


def killed(database: Any, how: str) -> None:
    """Kill the operations that wait for events of this database, as an operator can."""
    admin = database.client.admin
    mine = {"command.getMore": {"$exists": True}, "ns": {"$regex": f"^{database.name}"}}
    active = list(admin.aggregate([{"$currentOp": {"allUsers": True}}, {"$match": mine}]))
    if how == "killOp":
        for each in active:
            admin.command({"killOp": 1, "op": each["opid"]})
    elif how == "killCursors":
        for each in active:
            database.command({"killCursors": "$cmd.aggregate", "cursors": [each["command"]["getMore"]]})
    else:
        admin.command({how: []})


@pytest.mark.parametrize("how", ["killOp", "killCursors", "killAllSessions"])
def test_a_stream_goes_on_behind_an_operators_kill(mongodb_uri: str, database: Any, how: str) -> None:
    """After `killOp`, `killCursors` and `killAllSessions` on the waiting getMore the stream resumes; no event is lost or repeated."""
    found: list[Any] = []
    failed: list[BaseException] = []
    halt = threading.Event()
    # The server kills a waiting operation when its wait ends.
    options = change_stream.StreamOptions(db=database.name, max_await_ms=200)
    with contextlib.closing(mongodb.client(mongodb_uri)) as client:
        opened = change_stream.ChangeStream(client, options, change_stream.StreamStart(), initial_delay=0.01, stopped=halt)
        opened.open()

        def read() -> None:
            try:
                while "last" not in found:
                    found.extend(bson.decode(raw)["documentKey"]["_id"] for raw in opened.next().events if b"insert" in raw)
            except BaseException as error:
                failed.append(error)

        reading = threading.Thread(target=read)
        reading.start()
        for number in range(5):
            database.orders.insert_one({"_id": number})
            before, end = opened.reconnects, time.monotonic() + 30
            while opened.reconnects == before and not failed and time.monotonic() < end:
                killed(database, how)
        with contextlib.suppress(Exception):  # the client's own session may have been killed
            database.orders.find_one()
        database.orders.insert_one({"_id": "last"})
        reading.join(30)
        opened.close()
    assert not failed
    assert found == [0, 1, 2, 3, 4, "last"]
    assert opened.reconnects >= 5


# --- a stage that changes tokens ---


def test_error_280_of_a_pipeline_is_no_lost_position(mongodb_uri: str, database: Any) -> None:
    """If a stage changes an event's `_id`, the server's error has the code of a lost position; the error must not be reported as one."""
    stages = [{"$set": {"_id": "x"}}]
    with contextlib.closing(mongodb.client(mongodb_uri)) as client:
        opened = change_stream.ChangeStream(
            client, change_stream.StreamOptions(db=database.name, stages=stages), change_stream.StreamStart()
        )
        opened.open()
        database.orders.insert_one({"_id": 1})
        with pytest.raises(errors.SettingsError, match="cursor.pipeline: its stages change _id"), contextlib.closing(opened):
            while True:
                opened.next()


# --- one server of several, with credentials ---


def test_a_read_preference_in_the_connection_string_keeps_the_credentials(
    protected_mongodb: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream uses its own client for one server, with user, password and the other options of the connection string."""
    monkeypatch.setenv("PLAIN", protected_mongodb.uri)
    monkeypatch.setenv("CHOSEN", f"{protected_mongodb.uri}&readPreference=secondaryPreferred&readPreferenceTags=dc:a,use:b")
    for name in ("PLAIN", "CHOSEN"):
        each = settings(f"${{env:{name}}}", **{"database.include.list": "shop"})
        with contextlib.closing(connections.connection(each.source).client()) as client:
            with stream(client, each) as opened:
                client.shop.orders.insert_one({"a": 1})
                assert changes(opened, client)
            assert snapshot_rows(each, client, after=mongodb_server.operation_time(client))


# --- values in a collection's options ---


def far(db: Any, name: str, **options: Any) -> None:
    """A collection or view with options that contain a date beyond `datetime`, and text that is not UTF-8."""
    date = bson.datetime_ms.DatetimeMS(8_640_000_000_000_000)
    condition = bson.encode({"until": {"$lt": date}, "note": {"$ne": "QQ"}}).replace(b"QQ", b"\xff\xfe")
    raw = RawBSONDocument(condition)
    given = {"viewOn": "a", "pipeline": [{"$match": raw}]} if options.get("view") else {"validator": raw}
    db.command({"create": name, **given})


def test_a_validator_or_a_view_that_no_driver_reads(mongo: Any, database: Any) -> None:
    """The list of collections ignores the contents of their options, and is complete."""
    database.a.insert_one({"_id": 1})
    far(database, "validated")
    far(database, "viewed", view=True)
    found = {each.name: each.kind for each in catalog.collections(mongo, [database.name])}
    assert found == {"a": "collection", "validated": "collection", "viewed": "view"}


def test_a_filter_is_tried_however_large_it_is(mongo: Any, database: Any) -> None:
    """For example a filter with many keys. If the server closed the connection over it, the capture would restart and read its signal
    again, each time.
    """
    database.a.insert_one({"_id": 1})
    name = f"{database.name}.a"
    assert snapshot_read.refusal_of_filter(mongo, name, {"a": "x" * (15 << 20)}) is None
    assert "larger" in (snapshot_read.refusal_of_filter(mongo, name, {"a": "x" * (17 << 20)}) or "")


def test_a_filter_over_a_collection_that_no_driver_reads(mongo: Any, database: Any) -> None:
    """The server's reply quotes the filter; a date beyond `datetime` in it is no reason to refuse the filter."""
    far(database, "validated")
    condition = {"until": {"$lt": bson.datetime_ms.DatetimeMS(8_640_000_000_000_000)}}
    assert snapshot_read.refusal_of_filter(mongo, f"{database.name}.validated", condition) is None


# --- names that no driver can send ---


def sent(mongo: Any, *elements: bytes) -> None:
    """Send a command as bytes, as a client that checks no names does."""
    [address] = mongo.nodes
    message = struct.pack("<IB", 0, 0) + document(*elements)
    with socket.create_connection(address) as connection, connection.makefile("rb") as replies:
        connection.sendall(struct.pack("<iiii", 16 + len(message), 1, 0, 2013) + message)
        (size,) = struct.unpack("<i", replies.read(4))
        reply = bson.decode(replies.read(size - 4)[17:], cursor_reply.LENIENT)
    assert reply["ok"] == 1, reply


def test_names_that_are_no_utf8_stop_nothing(
    mongodb_uri: str, mongo: Any, database: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The server lets everyone who may write create them. The other databases and collections are listed, streamed and read, also if a
    captured collection takes such a name.
    """
    db, odd_db = database.name.encode(), database.name.encode() + b"\xff"
    made = b"\x04documents\0" + document(b"\x030\0" + document(b"\x10_id\0\1\0\0\0"))
    found = settings(mongodb_uri, **{"database.include.list": database.name})
    begins = mongodb_server.operation_time(mongo)
    with stream(mongo, found) as opened:
        database.orders.insert_one({"_id": 1})
        database.moved.insert_one({"_id": 1})
        for name in (b"a\xff", b"a\xfe"):
            sent(mongo, b"\x02insert\0" + text(name), made, b"\x02$db\0" + text(db))
        names = b"\x02renameCollection\0" + text(db + b".moved"), b"\x02to\0" + text(db + b".b\xff")
        sent(mongo, *names, b"\x02$db\0" + text(b"admin"))
        sent(mongo, b"\x02insert\0" + text(b"orders"), made, b"\x02$db\0" + text(odd_db))
        database.orders.insert_one({"_id": 2})
        try:
            landed = changes(opened, mongo)
            with caplog.at_level(logging.WARNING):
                assert database.name in catalog.database_names(mongo)
                assert [each.name for each in catalog.collections(mongo, [database.name])] == ["orders"]
            rows = snapshot_rows(found, mongo, after=begins)
        finally:
            sent(mongo, b"\x10dropDatabase\0\1\0\0\0", b"\x02$db\0" + text(odd_db))
    assert [(row["collection"], row["key"]) for row in landed] == [("orders", "1"), ("moved", "1"), ("orders", "2")]
    assert [(row["collection"], row["key"]) for row in rows] == [("orders", "1"), ("orders", "2")]
    assert "b'a\\xff'" in caplog.text


def test_a_collection_that_takes_such_a_name_has_changed(mongodb_uri: str, mongo: Any, database: Any) -> None:
    """The server's error quotes the collection's new name."""
    database.orders.insert_one({"_id": 1})
    [listed] = catalog.collections(mongo, [database.name])
    names = [text(f"{database.name}.".encode() + name) for name in (b"orders", b"a\xff")]
    sent(mongo, b"\x02renameCollection\0" + names[0], b"\x02to\0" + names[1], b"\x02$db\0" + text(b"admin"))
    with pytest.raises(mongodb_failures.CollectionChanged):
        list(snapshot_read.read_chunk(mongo, listed, snapshot_read.IdRange(), after=mongodb_server.operation_time(mongo)))


LISTS: dict[str, dict[str, str]] = {
    "a database": {"database.include.list": "{}"},
    "a collection": {"collection.include.list": "{}.orders"},
    "all collections": {"collection.include.list": r"{}\..*"},
    "databases by a pattern": {"collection.include.list": "{}.*orders"},
    "several entries": {"collection.include.list": "{}.*orders,zz.y"},
    "a pattern is excluded": {"collection.exclude.list": "zz.*y"},
}


@pytest.mark.parametrize("lists", LISTS.values(), ids=LISTS)
def test_events_of_names_that_are_no_utf8_stop_no_stream(
    mongodb_uri: str, mongo: Any, database: Any, lists: dict[str, str]
) -> None:
    """The server evaluates a list also over events that it does not let through, and its `$regexMatch` fails at such a name."""
    db, odd_db = database.name.encode(), database.name.encode() + b"\xff"
    made = b"\x04documents\0" + document(b"\x030\0" + document(b"\x10_id\0\1\0\0\0"))
    with stream(
        mongo, settings(mongodb_uri, **{name: entry.format(database.name) for name, entry in lists.items()})
    ) as opened:
        database.moved.insert_one({"_id": 1})
        database.orders.insert_one({"_id": 1})
        sent(mongo, b"\x02insert\0" + text(b"a\xff"), made, b"\x02$db\0" + text(db))
        sent(mongo, b"\x02insert\0" + text(b"a\xff"), made, b"\x02$db\0" + text(odd_db))
        sent(mongo, b"\x10dropDatabase\0\1\0\0\0", b"\x02$db\0" + text(odd_db))
        names = b"\x02renameCollection\0" + text(db + b".moved"), b"\x02to\0" + text(db + b".b\xff")
        sent(mongo, *names, b"\x02$db\0" + text(b"admin"))
        sent(mongo, b"\x02drop\0" + text(b"a\xff"), b"\x02$db\0" + text(db))
        database.orders.insert_one({"_id": 2})
        landed = [row["key"] for row in changes(opened, mongo) if row["collection"] == "orders"]
    assert landed == ["1", "2"]
