"""Errors of an executor that reads a collection are returned as data, with their class."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import bson
import pyarrow as pa
import pytest
from bson.timestamp import Timestamp

from cdc_core import errors
from cdc_core.schema.document_schema import DocumentSchema
from pipelines.mongodb import failures as mongodb_failures
from pipelines.mongodb import snapshot_read
from pipelines.verify import documents

UNUSED: Any = None


def reading(*, is_exact: bool = False) -> documents.ReadSpec:
    collection: Any = SimpleNamespace(namespace="shop.orders")
    return documents.ReadSpec(UNUSED, collection, (1, 1), DocumentSchema().to_json(), is_exact=is_exact)


@pytest.mark.parametrize(
    ("raised", "kind", "attempts"),
    [
        (errors.SourceUnreachable("an election"), errors.SourceUnreachable, documents.ATTEMPTS),
        (mongodb_failures.SnapshotExpired(), errors.SourceUnreachable, documents.ATTEMPTS),
        (mongodb_failures.CollectionChanged(), errors.Temporary, 1),
        (mongodb_failures.ReadRefused("the server refuses to read it (error 2)"), errors.DecisionNeeded, 1),
        (errors.AccessRefused("the user lacks a right"), errors.AccessRefused, 1),
        (ValueError("of a document"), errors.MedallionError, 1),
    ],
)
def test_what_an_executor_cannot_read_is_an_outcome(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, kind: type[Exception], attempts: int
) -> None:
    """An interruption is retried after pauses of growing length; if it persists, the other ranges of the read fail at once."""
    asked: list[int] = []
    paused: list[float] = []

    def read_chunk(*_: Any, **__: Any) -> Any:
        asked.append(1)
        raise raised

    monkeypatch.setattr(documents, "_failed", {})
    monkeypatch.setattr(documents.connections, "worker_client", lambda _: UNUSED)
    monkeypatch.setattr(snapshot_read, "read_chunk", read_chunk)
    # Only in this module: threads of a client from another test may sleep too.
    monkeypatch.setattr(documents, "time", SimpleNamespace(sleep=paused.append, monotonic=time.monotonic))
    batches = iter([pa.RecordBatch.from_pydict({"id": [0, 1]})])
    ranges = (snapshot_read.IdRange(), snapshot_read.IdRange())
    found = pa.Table.from_batches(documents._read_ranges(reading(), ranges, "a read", batches))
    assert found.schema.equals(documents.READ)
    assert found["key"].to_pylist() == [None, None]
    (told,) = {documents.error_of(text).__class__ for text in found["error"].to_pylist()}
    assert told is kind
    assert "of a document" not in str(found["error"].to_pylist())
    assert len(asked) == attempts
    assert paused == [documents.PAUSE * 2**n for n in range(attempts - 1)]


def test_a_time_that_the_user_gave_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server no longer has it, and will not have it the next time."""

    def read_chunk(*_: Any, **__: Any) -> Any:
        raise mongodb_failures.SnapshotExpired

    monkeypatch.setattr(snapshot_read, "read_chunk", read_chunk)
    with pytest.raises(errors.DecisionNeeded, match="leave out --as-of"):
        documents.by_keys(UNUSED, reading(is_exact=True), ["1"])


def test_documents_are_read_by_their_keys_as_far_as_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few huge documents hide behind a small average: two thousand of them do not fit into memory as BSON, texts and rows."""
    sizes = {number: 100 if number < 600 else 10_000 for number in range(900)}
    read: list[int] = []

    def read_chunk(client: Any, collection: Any, bounds: Any, *, condition: Any, **_: Any) -> Any:
        yield snapshot_read.Chunk([], Timestamp(5, 1))
        for number in sorted(condition["_id"]["$in"]):
            if number != 700:
                read.append(sizes[number])
                yield snapshot_read.Chunk([bson.encode({"_id": number, "text": "x" * sizes[number]})], Timestamp(5, 1))

    monkeypatch.setattr(snapshot_read, "read_chunk", read_chunk)
    monkeypatch.setattr(documents, "LOOK_BYTES", 180_000)
    wanted, found = [str(number) for number in sizes], {}
    while len(found) < len(wanted):
        read.clear()
        some = documents.by_keys(UNUSED, reading(), wanted[len(found) :])
        assert list(some) == wanted[len(found) :][: len(some)] and some
        assert sum(len(each.text or "") for each in some.values()) < 190_000
        assert sum(read) < 2 * 190_000
        found |= some
    assert [key for key, each in found.items() if each.text is None] == ["700"]
    monkeypatch.setattr(documents, "LOOK_BYTES", 1)
    assert list(documents.by_keys(UNUSED, reading(), ["899", "898"])) == ["899"]  # larger than the room, but alone
