"""Which events are repeated, and skipped, if a stream is opened at the cluster time of an event that was already read."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import bson
import pytest
from pymongo import errors as driver

from cdc_core.stream import resume_token
from pipelines.mongodb import change_stream
from pipelines.mongodb import failures as mongodb_failures


def found(server_type: str, **more: Any) -> Any:
    """A client that has found one server of this type."""
    servers = {("a", 1): SimpleNamespace(server_type_name=server_type)}
    return SimpleNamespace(topology_description=SimpleNamespace(server_descriptions=lambda: servers), **more)


def token(version: int, index: int) -> str:
    number = f"2B{index << 1:02X}" if index else "29"
    return f"826B0137A500000001{f'2B{version << 1:02X}'}2C0100{number}{'6E' if version == 2 else ''}5A1004{'AB' * 16}461E5F6964002B020004"


def event(version: int, index: int) -> bytes:
    return bson.encode({"_id": {"_data": token(version, index)}, "operationType": "insert"})


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (1, 2), (2, 1)])
def test_the_rest_of_a_transaction_comes_in_whatever_format(before: int, after: int) -> None:
    """No event is repeated, and none is lost."""
    replay = change_stream.Replay(token(before, 1))
    every = [event(after, index) for index in range(4)]
    assert replay.unseen(every) == every[2:] and replay.has_met
    assert change_stream.Replay(token(before, 3)).unseen(every) == []


def test_a_reply_without_news_is_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next reply of the server may contain more of the transaction."""
    nothing: Any = None
    start = change_stream.StreamStart(token(2, 3))
    stream = change_stream.ChangeStream(nothing, change_stream.StreamOptions(), start, stopped=threading.Event())

    class Cursor:
        is_open = True
        replies = [[event(2, 0), event(2, 1)], [event(2, 4)], []]

        def more(self, **_: Any) -> tuple[int, list[bytes], dict[str, Any]]:
            events = self.replies.pop(0)
            return sum(map(len, events)), events, {}

    monkeypatch.setattr(stream, "_cursor", Cursor())
    monkeypatch.setattr(stream, "_count_election", lambda: None)
    stream._replay = change_stream.Replay(token(2, 3), has_met=True)
    found = [stream._more() for _ in range(3)]
    assert [(len(each.events), each.is_drained) for each in found] == [(0, False), (1, False), (0, True)]


def test_a_reply_before_the_events_that_come_again_is_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The position is inside the transaction, and the server has not reached it yet, so the rest may still come.

    After the transaction the stream is drained, even if the server's clock has not advanced.
    """
    nothing: Any = None
    start = change_stream.StreamStart(token(2, 3))
    stream = change_stream.ChangeStream(nothing, change_stream.StreamOptions(), start, stopped=threading.Event())
    before = "826B0137A5000000012B042C0100296E04"

    class Cursor:
        is_open = True
        replies = [([], before), ([], before), ([0, 1, 2, 3], token(2, 3)), ([], token(2, 3))]

        def more(self, **_: Any) -> tuple[int, list[bytes], dict[str, Any]]:
            places, mark = self.replies.pop(0)
            return 1, [event(2, place) for place in places], {"postBatchResumeToken": {"_data": mark}}

    monkeypatch.setattr(stream, "_cursor", Cursor())
    monkeypatch.setattr(stream, "_count_election", lambda: None)
    stream._replay = change_stream.Replay(token(2, 3))
    stream.probe()
    found = [stream.next() for _ in range(4)]
    assert {each.token for each in found} == {token(2, 3)} and not any(each.events for each in found)
    assert [each.is_drained for each in found] == [False, False, False, True]


def test_a_wait_for_the_next_part_of_an_event_does_not_move_the_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mongos that waits too long for a shard replies without events, and with the token of the part that it has sent.

    A capture that stops there and starts behind that token would skip the whole event.
    """
    nothing: Any = None
    start = change_stream.StreamStart(token(2, 0))
    stream = change_stream.ChangeStream(nothing, change_stream.StreamOptions(), start)
    first, last = (token(2, 1).removesuffix("04") + f"{0x2B:02X}{number << 1:02X}04" for number in (1, 2))
    assert resume_token.compare(first, last) == 0

    def part(place: str, number: int) -> bytes:
        split = {"fragment": number, "of": 2}
        return bson.encode({"_id": {"_data": place}, "splitEvent": split, "operationType": "insert"})

    class Cursor:
        is_open = True
        replies = [([part(first, 1)], first), ([], first), ([part(last, 2)], last), ([], last)]

        def more(self, **_: Any) -> tuple[int, list[bytes], dict[str, Any]]:
            events, mark = self.replies.pop(0)
            return 1, events, {"postBatchResumeToken": {"_data": mark}}

    monkeypatch.setattr(stream, "_cursor", Cursor())
    monkeypatch.setattr(stream, "_count_election", lambda: None)
    found = [stream.next() for _ in range(4)]
    assert [(each.token, each.is_drained) for each in found] == [
        (token(2, 0), False),
        (token(2, 0), False),
        (last, False),
        (last, True),
    ]


@pytest.mark.parametrize("is_mongos", [False, True])
def test_a_router_that_has_no_event_may_have_more_of_the_last_cluster_time(
    monkeypatch: pytest.MonkeyPatch, is_mongos: bool
) -> None:
    """It waits for its shards for a limited time. What was read up to there is then not all of the cluster time, of which bronze would say
    that it is complete, and a cut would have a part of a transaction."""
    stream = change_stream.ChangeStream(
        found("Mongos" if is_mongos else "RSPrimary"), change_stream.StreamOptions(), change_stream.StreamStart()
    )

    class Cursor:
        is_open = False
        replies = [[0], [], [1], []]

        def open(self, *_: Any) -> dict[str, Any]:
            self.is_open = True
            return {}

        def more(self, **_: Any) -> tuple[int, list[bytes], dict[str, Any]]:
            return 1, [event(2, place) for place in self.replies.pop(0)], {}

    monkeypatch.setattr(stream, "_cursor", Cursor())
    monkeypatch.setattr(stream, "_count_election", lambda: None)
    batches = [stream.next() for _ in range(4)]
    assert [(len(each.events), each.is_drained) for each in batches] == [
        (1, False),
        (0, not is_mongos),
        (1, False),
        (0, not is_mongos),
    ]


@pytest.mark.parametrize(("is_mongos", "waits"), [(False, 1), (True, change_stream.LONGEST_AWAIT_MS)])
def test_a_first_look_is_too_short_to_say_that_nothing_comes(
    monkeypatch: pytest.MonkeyPatch, is_mongos: bool, waits: int
) -> None:
    """It waits for a millisecond, or until all shards can have reported that the position is lost. The next reply decides."""
    nothing: Any = None
    stream = change_stream.ChangeStream(nothing, change_stream.StreamOptions(), change_stream.StreamStart())
    stream._is_merged = is_mongos
    asked: list[Any] = []

    def more(*, max_await_ms: int | None = None) -> change_stream.EventBatch:
        asked.append(max_await_ms)
        return change_stream.EventBatch([], "82", 1, is_drained=True)

    monkeypatch.setattr(stream, "_more", more)
    monkeypatch.setattr(stream, "_cursor", SimpleNamespace(is_open=True))
    stream.probe()
    assert [stream.next().is_drained for _ in range(2)] == [False, True]
    assert asked == [waits, None]


@pytest.mark.parametrize("is_found", [True, False])
def test_a_stream_begins_behind_the_end_of_another_namespace(monkeypatch: pytest.MonkeyPatch, is_found: bool) -> None:
    """An invalidate that the stream's namespace does not know is not a lost position: the stream continues from its time.

    A token that is not found there either is one.
    """
    invalidate = token(2, 1).replace("6E5A", "6F5A")
    assert resume_token.is_invalidate(invalidate)
    stream = change_stream.ChangeStream(
        found("RSPrimary"), change_stream.StreamOptions(), change_stream.StreamStart(invalidate)
    )
    opened: list[dict[str, Any]] = []

    class Cursor:
        is_open = False

        def open(self, db: str | None, collection: str | None, stages: list[Any]) -> dict[str, Any]:
            opened.append(stages[0]["$changeStream"])
            self.is_open = True
            return {}

        def more(self, **_: Any) -> tuple[int, list[bytes], dict[str, Any]]:
            if "startAfter" in opened[-1] or not is_found:
                raise driver.OperationFailure("the resume token was not found", 280)
            return 1, [event(2, 0), event(2, 2)], {}

        def forget(self) -> None:
            self.is_open = False

    monkeypatch.setattr(stream, "_cursor", Cursor())
    monkeypatch.setattr(stream, "_count_election", lambda: None)
    if is_found:
        assert stream.next().events == [event(2, 2)]
    else:
        with pytest.raises(mongodb_failures.HistoryLost):
            stream.next()
    assert ["startAfter" in each for each in opened] == [True, False]


def lost(code: int) -> driver.OperationFailure:
    return driver.OperationFailure("", code)


@pytest.mark.parametrize(
    ("is_mongos", "holds", "expected"),
    [
        (False, True, None),
        (False, False, mongodb_failures.HistoryLost),
        (False, lost(mongodb_failures.CHANGE_STREAM_HISTORY_LOST), None),
        (False, lost(mongodb_failures.CURSOR_NOT_FOUND), driver.OperationFailure),
        (True, False, None),
    ],
    ids=["in the oplog", "in another oplog", "older than the oplog", "interrupted", "of a shard that is gone"],
)
def test_a_time_without_an_event_is_known_by_the_event_before_it(
    monkeypatch: pytest.MonkeyPatch, is_mongos: bool, holds: bool | Exception, expected: type[Exception] | None
) -> None:
    """The server accepts any time: only an oplog that reaches back to the event and lacks it is another one."""
    mark = "826B0137A5000000022B0429296E1404"
    start = change_stream.StreamStart(mark, event=token(2, 1))
    stream = change_stream.ChangeStream(found("Mongos" if is_mongos else "RSPrimary"), change_stream.StreamOptions(), start)
    cursor = SimpleNamespace(is_open=False, open=lambda *_: {}, close=lambda: None)
    monkeypatch.setattr(stream, "_cursor", cursor)

    def answer(self: change_stream.ChangeStream, event: str) -> bool:
        assert event == token(2, 1)
        if isinstance(holds, Exception):
            raise holds
        return holds

    monkeypatch.setattr(change_stream.ChangeStream, "holds", answer)
    if expected is None:
        assert stream.open() == mark
        return
    with pytest.raises(expected):
        stream.open()
