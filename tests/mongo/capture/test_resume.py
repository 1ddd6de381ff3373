from __future__ import annotations

import contextlib
import datetime
import threading
import uuid
from dataclasses import replace
from typing import Any

import pytest
from bson import Binary, Code, Decimal128, Int64, MaxKey, ObjectId, Timestamp
from bson.datetime_ms import DatetimeMS
from bson.raw_bson import RawBSONDocument

from cdc_core import errors
from cdc_core.settings import parse as settings
from cdc_core.stream import resume_token
from pipelines.bronze import log as bronze
from pipelines.capture.deployment import Deployment
from pipelines.capture.stream_opener import StreamOpener
from pipelines.mongodb import change_stream
from pipelines.mongodb import connection as connections
from pipelines.mongodb import failures as mongodb_failures
from pipelines.mongodb import server as mongodb_server

IDS = (
    *(
        5,
        Int64(6),
        7.0,
        Decimal128("8"),
        Int64(2**31 + 1),
        Int64(2**40),
        Int64(2**53 + 99),
        2.0**41,
        -0.0,
        0.5,
        1e300,
    ),
    *(
        Decimal128("1.5"),
        Decimal128("2.10"),
        float("nan"),
        float("inf"),
        "text",
        None,
        True,
        ObjectId(),
        Code("x"),
    ),
    *(
        {"a": Int64(2**40)},
        {"b": 2.5},
        {},
        Timestamp(1, 1),
        datetime.datetime(2020, 1, 1),
        Binary(b"x", 128),
        MaxKey(),
    ),
    Binary(uuid.UUID(int=5).bytes, 4),
)


def stream(client: Any, db: str, token: str | None) -> change_stream.ChangeStream:
    options = change_stream.StreamOptions(db=db, max_await_ms=50)
    return change_stream.ChangeStream(client, options, change_stream.StreamStart(token))


def read(opened: change_stream.ChangeStream, count: int) -> list[tuple[str, str]]:
    """Token and `_id`, as text, of the next inserts."""
    found: list[tuple[str, str]] = []
    with contextlib.closing(opened):
        for _ in range(200):
            for raw in opened.next().events:
                event = RawBSONDocument(raw)
                if event["operationType"] == "insert":
                    found.append((event["_id"]["_data"], repr(event["documentKey"]["_id"])))
            if len(found) >= count:
                return found
    raise AssertionError(f"{len(found)} of {count} events")


@pytest.fixture
def recorded(database: Any) -> tuple[str | None, list[tuple[str, str]]]:
    """The token at which a stream began, and its inserts of one document per kind of `_id`."""
    database.create_collection("x")
    began = stream(database.client, database.name, None)
    began.open()
    for value in IDS:
        database.x.insert_one({"_id": value, "far": DatetimeMS(2**62)})
    database.x.insert_many([{"_id": f"m{number}"} for number in range(3)])
    return began.token, read(began, len(IDS) + 3)


def test_a_stream_resumes_behind_every_kind_of_id(database: Any, recorded: tuple[str | None, list[tuple[str, str]]]) -> None:
    """After an event with any kind of `_id` the stream continues with the next event: none is lost or repeated."""
    _, events = recorded
    for number, (token, _) in enumerate(events[:-1]):
        assert not resume_token.resumes_alone(token)
        following = events[number + 1 :]
        assert read(stream(database.client, database.name, token), len(following)) == following


def test_a_stream_resumes_inside_a_transaction(database: Any, recorded: tuple[str | None, list[tuple[str, str]]]) -> None:
    """Events with the same cluster time are distinguished."""
    began, _ = recorded
    with database.client.start_session() as session, session.start_transaction():
        for value in (Int64(2**41), 1.25, "z"):
            database.x.insert_one({"_id": {"t": value}}, session=session)
    events = read(stream(database.client, database.name, began), len(IDS) + 6)[-3:]
    assert len({token[:18] for token, _ in events}) == 1
    assert read(stream(database.client, database.name, events[0][0]), 2) == events[1:]


def test_a_stream_resumes_behind_a_high_water_mark(
    database: Any, recorded: tuple[str | None, list[tuple[str, str]]]
) -> None:
    """The token of a time without an event can be resumed directly."""
    began, events = recorded
    assert began is not None
    assert resume_token.resumes_alone(began)
    assert read(stream(database.client, database.name, began), len(events)) == events


def test_a_lost_connection_changes_nothing(database: Any, recorded: tuple[str | None, list[tuple[str, str]]]) -> None:
    """A stream that is reopened continues after the last event that it returned."""
    began, events = recorded
    opened = stream(database.client, database.name, began)
    assert read(opened, len(events)) == events
    opened.token = events[5][0]
    assert read(opened, len(events) - 6) == events[6:]


def test_a_position_of_another_oplog_is_lost(database: Any, recorded: tuple[str | None, list[tuple[str, str]]]) -> None:
    """A token that the oplog does not contain, with a time that it does contain, cannot be resumed."""
    _, events = recorded
    foreign = events[3][0].replace(resume_token_uuid(events[3][0]), "00" * 16)
    with pytest.raises(mongodb_failures.HistoryLost):
        read(stream(database.client, database.name, foreign), 1)


def test_a_time_without_an_event_is_of_this_oplog_if_its_last_event_is(
    database: Any, recorded: tuple[str | None, list[tuple[str, str]]]
) -> None:
    """The server accepts any time. After an older copy of its data was restored, and in another deployment, the event is missing."""
    began, events = recorded
    assert began is not None
    of_this = events[3][0]
    foreign = of_this.replace(resume_token_uuid(of_this), "00" * 16)
    for event, is_lost in ((None, False), (of_this, False), (foreign, True)):
        start = change_stream.StreamStart(began, event=event)
        opened = change_stream.ChangeStream(database.client, change_stream.StreamOptions(db=database.name), start)
        with pytest.raises(mongodb_failures.HistoryLost) if is_lost else contextlib.nullcontext():
            opened.open()
        assert opened.is_open is not is_lost
        opened.close()


def test_a_server_that_comes_back_with_older_data_is_told(database: Any) -> None:
    """While the stream was quiet: it resumes at a time, and the oplog lacks its last event."""
    opened = stream(database.client, database.name, None)
    with contextlib.closing(opened):
        opened.open()
        database.x.insert_one({"_id": 1})
        while not opened.next().events:
            pass
        database.client.admin.command("appendOplogNote", 1, data={})
        while not resume_token.resumes_alone(opened.token or ""):
            opened.next()
        opened._cursor.close()
        opened.next()
        assert opened._event is not None
        opened._event = opened._event.replace(resume_token_uuid(opened._event), "00" * 16)
        opened._cursor.close()
        with pytest.raises(mongodb_failures.HistoryLost):
            opened.next()


def test_another_server_at_the_address_is_told_without_any_event(database: Any) -> None:
    """Its oplog begins after the position, and has never been truncated: it accepts any earlier time."""
    opened = stream(database.client, database.name, None)
    with contextlib.closing(opened):
        opened.open()
        opened.next()
        assert opened._event is None and opened.token is not None
        opened.token = earlier(opened.token, seconds=100 * 86_400)
        opened._cursor.close()
        with pytest.raises(mongodb_failures.HistoryLost):
            opened.next()


def earlier(token: str, *, seconds: int) -> str:
    return f"82{resume_token.position(token).seconds - seconds:08X}{token[10:]}"


def test_a_position_from_outside_the_oplogs_time_is_none_of_this_deployment(mongodb_uri: str, mongo: Any) -> None:
    """An oplog that has never rolled accepts a time before its beginning, but its events are another deployment's. A position ahead of
    the server's time would be waited for, and all events until then would be lost.
    """
    found = settings.parse(
        {"name": "shop", "lakehouse": {"root": "lake"}, "source": {"mongodb.connection.string": mongodb_uri}}
    )
    deployment = Deployment.of(found.source, connections.connection(found.source), mongo)
    opener = StreamOpener(deployment, deployment.stream_options(), threading.Event())
    first = opener.open(None).stream
    first.close()
    assert first.begins is not None and resume_token.resumes_alone(first.begins)

    def at(seconds: int) -> bronze.BronzePosition:
        return bronze.BronzePosition(earlier(first.begins or "", seconds=-seconds), 1, 1)

    opener.open(at(0)).stream.close()
    name = mongodb_server.server_info(mongo).replica_set
    replace(opener, replica_sets=(name, name)).open(at(0)).stream.close()
    with pytest.raises(errors.PositionLost):
        replace(opener, replica_sets=("rs-of-staging", name)).open(at(0))
    with pytest.raises(errors.PositionLost):
        opener.open(at(-100 * 86_400))
    with pytest.raises(errors.SourceUnsuitable, match="behind bronze's position"):
        opener.open(at(86_400))


@pytest.mark.parametrize("is_quiet", [False, True])
def test_a_stream_goes_on_everywhere_behind_the_end_of_its_database(mongo: Any, database: Any, is_quiet: bool) -> None:
    """A capture of one database resumes after the database was dropped and before it is created again. The deployment's stream does not
    contain the invalidate event, and the server reports this with its next event, however late. The position is not lost.
    """
    name = f"{database.name}_gone"
    mongo[name].things.insert_one({"_id": 0})
    of_one = stream(mongo, name, None)
    of_one.open()
    mongo.drop_database(name)
    tokens: list[str] = []
    with contextlib.closing(of_one):
        while not tokens or not resume_token.is_invalidate(tokens[-1]):
            tokens += [RawBSONDocument(raw)["_id"]["_data"] for raw in of_one.next().events]
    everywhere = change_stream.ChangeStream(
        mongo, change_stream.StreamOptions(max_await_ms=50), change_stream.StreamStart(tokens[-1])
    )
    everywhere.open()
    everywhere.probe()
    if is_quiet:
        # An oplog entry that is no event: the server's time moves, and the stream's position with it.
        mongo.admin.command("appendOplogNote", 1, data={})
        while everywhere.token == tokens[-1]:
            assert not everywhere.next().events
    mongo[name].things.insert_one({"_id": 1})
    try:
        assert [key for _, key in read(everywhere, 1)] == ["1"]
    finally:
        mongo.drop_database(name)


def resume_token_uuid(token: str) -> str:
    """The collection's UUID in a token."""
    at = token.index("5A1004") + 6
    return token[at : at + 32]


def test_an_event_that_the_users_stages_hide_meanwhile_is_no_lost_position(database: Any) -> None:
    """The stage passed the update's event, and hides it after another look-up; the stream continues after it."""

    def opened(token: str | None) -> change_stream.ChangeStream:
        stages = [{"$match": {"fullDocument.s": "open"}}]
        options = change_stream.StreamOptions(db=database.name, stages=stages, full_document="updateLookup", max_await_ms=50)
        return change_stream.ChangeStream(database.client, options, change_stream.StreamStart(token))

    first = opened(None)
    first.open()
    database.x.insert_one({"_id": 1, "s": "open"})
    database.x.update_one({"_id": 1}, {"$set": {"n": 1}})
    tokens: list[str] = []
    with contextlib.closing(first):
        while len(tokens) < 2:
            tokens += [RawBSONDocument(raw)["_id"]["_data"] for raw in first.next().events]
    database.x.update_one({"_id": 1}, {"$set": {"s": "closed"}})
    database.x.insert_one({"_id": 2, "s": "open"})
    assert [name for _, name in read(opened(tokens[-1]), 1)] == ["2"]


def test_an_event_of_a_wider_scope_is_held(mongo: Any, database: Any) -> None:
    """While a database does not exist, the whole deployment is watched. The next stream is of this database only, and must hold a
    position of the wider stream.
    """
    name = f"{database.name}_other"
    everywhere = change_stream.ChangeStream(mongo, change_stream.StreamOptions(max_await_ms=50), change_stream.StreamStart())
    everywhere.open()
    mongo[name].things.insert_one({"_id": Int64(2**40)})
    ((token, _),) = read(everywhere, 1)
    mongo.drop_database(name)
    database.things.insert_one({"_id": 1})
    narrow = stream(mongo, database.name, None)
    narrow.open()
    assert narrow.holds(token)
    seconds = resume_token.position(token).seconds
    assert not narrow.holds(token.replace(f"82{seconds:08X}", f"82{seconds - 1:08X}", 1))
    narrow.close()
