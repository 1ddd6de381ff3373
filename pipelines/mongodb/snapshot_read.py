"""Reads chunks of a collection, each at one known cluster time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import pymongo
from bson.int64 import Int64
from bson.raw_bson import RawBSONDocument
from bson.timestamp import Timestamp
from pymongo import errors as driver
from pymongo.read_preferences import ReadPreference

from cdc_core import errors
from cdc_core.extended_json import keys as canonical_keys
from cdc_core.extended_json import raw_bson
from pipelines.mongodb import catalog, cursor_reply
from pipelines.mongodb import client as mongodb
from pipelines.mongodb import failures as mongodb_failures
from pipelines.mongodb import server as mongodb_server

READ_MS = 3_600_000
"""How long the server may work on a chunk: far longer than its window of snapshot reads (300 s unless it was made longer), so that only a
filter without an end takes so long."""

PLAN_MS = 10_000
"""How long the server may try a filter: it may evaluate it on documents to compare indexes."""


@dataclass(frozen=True)
class IdRange:
    """A half-open range of `_id`, as BSON of ``{"lo": …}`` and ``{"hi": …}``: bytes, to be sent to executors unchanged."""

    lo: bytes | None = None
    hi: bytes | None = None

    def condition(self) -> dict[str, Any]:
        """The range as a filter of `find`. `$expr` compares across all BSON types, where a plain range would lose documents."""
        bounds = []
        if self.lo is not None:
            bounds.append({"$gte": ["$_id", RawBSONDocument(_renamed(self.lo, b"$literal"))]})
        if self.hi is not None:
            bounds.append({"$lt": ["$_id", RawBSONDocument(_renamed(self.hi, b"$literal"))]})
        return {"$expr": {"$and": bounds}} if bounds else {}

    def ends(self) -> dict[str, Any]:
        """The range as `min` and `max` of `find`, which need a hint; for clustered collections, which `$expr` would read whole.

        An open end includes MinKey and MaxKey there; an ordinary index leaves out MaxKey.
        """
        bounds = {"min": self.lo, "max": self.hi}
        return {name: RawBSONDocument(_renamed(end, b"_id")) for name, end in bounds.items() if end is not None}


_MAX_KEY = 0x7F
"""BSON's type number of MaxKey, which sorts after all other `_id` values."""


def boundary(
    connection: pymongo.MongoClient[Any], collection: catalog.SourceCollection, *, lo: bytes | None, documents: int
) -> bytes | None:
    """The `_id` that stands `documents` places after `lo` in index order, as BSON ``{"hi": _id}``; None past the end.

    Further behind where that has the same `_id` as `lo`. Reads the index only.
    """
    if lo is not None and lo[4] == _MAX_KEY:  # Nothing follows it, and the server refuses it as `min`.
        return None
    # Not `$expr`, for which the server fetches every document on the way. Leaving out MaxKey at the open end only makes the
    # last range one document longer.
    options = {**IdRange(lo=lo).ends(), "sort": {"_id": 1}}
    skip = documents
    # Several shards may have a document of this `_id`: a range that ends where it begins would be empty, and the next one as well.
    while (document := _first(connection, collection, {**options, "skip": skip})) is not None:
        if lo is None or not _is_of_one_id(document, lo):
            return id_as_hi(document)
        skip *= 2
    return None


def _is_of_one_id(document: bytes, lo: bytes) -> bool:
    return canonical_keys.canonical_raw(document) == canonical_keys.canonical_raw(_renamed(lo, b"_id"))


def greatest(connection: pymongo.MongoClient[Any], collection: catalog.SourceCollection) -> bytes | None:
    """The greatest `_id`, as BSON ``{"_id": …}``; None in an empty collection. Reads the index only."""
    return _first(connection, collection, {"sort": {"_id": -1}})


def _first(
    connection: pymongo.MongoClient[Any], collection: catalog.SourceCollection, options: Mapping[str, Any]
) -> bytes | None:
    """The first document that a `find` along the index of `_id` returns, with its `_id` alone; None without any."""
    command = {
        "find": collection.name,
        **options,
        "projection": {"_id": 1},
        "hint": {"_id": 1},
        "limit": 1,
        "singleBatch": True,
    }
    with mongodb_failures.translating_read(f"planning the snapshot of {collection.namespace}"):
        reply = connection[collection.db].command(
            command, codec_options=cursor_reply.RAW, read_preference=connection.read_preference
        )
    documents, _rest = cursor_reply.split_batch(bytes(reply.raw), b"firstBatch")
    return documents[0] if documents else None


def ranges(next_boundary: Callable[[bytes | None], bytes | None], lo: bytes | None = None) -> Iterator[IdRange]:
    """The ranges from `lo` on that end where `next_boundary` says (`boundary`); each is planned when it is needed.

    The end of a range is exclusive and the start of the next one inclusive: each `_id` is in exactly one.
    """
    while True:
        hi = next_boundary(lo)
        yield IdRange(lo, hi)
        if hi is None:
            return
        lo = hi_as_lo(hi)


def _within(
    collection: catalog.SourceCollection, bounds: IdRange, condition: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The options that restrict a `find` to a range and a condition."""
    ends = bounds.ends() if collection.is_clustered else {}
    conditions = [part for part in ({} if ends else bounds.condition(), dict(condition or {})) if part]
    return {"filter": {"$and": conditions} if len(conditions) > 1 else (conditions or [{}])[0], **ends}


def hi_as_lo(hi: bytes) -> bytes:
    """The end of one range as the beginning of the next."""
    return _renamed(hi, b"lo")


def id_as_hi(raw: bytes) -> bytes:
    """The `_id` of a raw document as the end of the range before it."""
    # Not decoded: an `_id` may hold a value that the driver refuses, such as a date after the year 9999.
    element = raw_bson.find(raw, b"_id")
    return _single(element.kind, b"hi", raw[element.start : element.end])


def _renamed(raw: bytes, name: bytes) -> bytes:
    """A document of one field with that field renamed. The value stays bytes: not every `_id` can be decoded."""
    name_end = raw.index(b"\0", 5)
    return _single(raw[4], name, raw[name_end + 1 : -1])


def _single(kind: int, name: bytes, value: bytes) -> bytes:
    body = bytes((kind,)) + name + b"\0" + value + b"\0"
    return (len(body) + 4).to_bytes(4, "little") + body


class Chunk(NamedTuple):
    """One batch of a chunk: raw documents, and the cluster time of the whole chunk."""

    documents: list[bytes]
    at: Timestamp


def read_chunk(
    connection: pymongo.MongoClient[Any],
    collection: catalog.SourceCollection,
    bounds: IdRange,
    *,
    after: Timestamp,
    fetch_size: int = 0,
    condition: Mapping[str, Any] | None = None,
    is_exact: bool = False,
) -> Generator[Chunk, None, None]:
    """Read the documents of a range, all at one cluster time at or after `after`, or at exactly that time with `is_exact`.

    Raises `SnapshotExpired` (read it again, smaller), `CollectionChanged`, `ReadRefused`, or one of `errors`. Capped collections
    have no snapshot reads: their time is the operation time from just before the read, and replaying the later changes converges.
    """
    # A capped collection's time is the primary's, which a secondary may not have reached (#14).
    preference = ReadPreference.PRIMARY if collection.is_capped else connection.read_preference
    reading = _reading(connection, preference)
    with (
        mongodb_failures.translating_read(f"reading a chunk of {collection.namespace}"),
        reading as (server, session),
    ):
        database = server[collection.db]
        read_time = mongodb_server.operation_time(connection) if collection.is_capped else None
        reply = database.command(
            _find(
                collection, bounds, after=read_time or after, fetch_size=fetch_size, condition=condition, is_exact=is_exact
            ),
            session=session,
            codec_options=cursor_reply.RAW,
            read_preference=preference,
        )
        name = b"firstBatch"
        while True:
            documents, rest = cursor_reply.split_batch(bytes(reply.raw), name)
            read_time = read_time or rest["atClusterTime"]
            yield Chunk(documents, read_time)
            if not rest["id"]:
                return
            name = b"nextBatch"
            reply = database.command(
                {"getMore": Int64(rest["id"]), "collection": collection.name}
                | ({"batchSize": fetch_size} if fetch_size else {}),
                session=session,
                codec_options=cursor_reply.RAW,
                read_preference=preference,
            )


def existing_ids(
    connection: pymongo.MongoClient[Any],
    collection: catalog.SourceCollection,
    condition: Mapping[str, Any],
    *,
    after: Timestamp,
) -> list[bytes]:
    """The `_id` of each document that matches a condition, as raw documents: as of `after` or later, whichever server is read."""
    command = {
        "find": collection.name,
        "filter": condition,
        "projection": {"_id": 1},
        "hint": {"_id": 1},
        "readConcern": {"level": "majority", "afterClusterTime": after},
    }
    with mongodb_failures.translating_read(f"looking for documents of {collection.namespace}"):
        documents = cursor_reply.drained(
            connection,
            collection.db,
            command,
            codec_options=cursor_reply.RAW,
            read_preference=connection.read_preference,
        )
        return [document.raw for document in documents]


@contextlib.contextmanager
def _reading(connection: pymongo.MongoClient[Any], preferred: Any) -> Iterator[tuple[pymongo.MongoClient[Any], Any]]:
    """The server that a chunk is read from, and a session on it.

    Raises `SnapshotExpired` where the cursor is gone (an election, a dropped collection): the chunk is to be read again.
    """
    pinned_client = mongodb.pinned(connection, preferred)
    server = pinned_client or connection
    try:
        with server.start_session() as session:
            yield server, session
    except driver.OperationFailure as error:
        if error.code in mongodb_failures.KILLED:
            raise mongodb_failures.SnapshotExpired from error
        raise
    finally:
        if pinned_client is not None:
            pinned_client.close()


def _find(
    collection: catalog.SourceCollection,
    bounds: IdRange,
    *,
    after: Timestamp,
    fetch_size: int,
    condition: Mapping[str, Any] | None,
    is_exact: bool = False,
) -> dict[str, Any]:
    command: dict[str, Any] = {
        "find": collection.name,
        **_within(collection, bounds, condition),
        "batchSize": fetch_size or 10_000,
        "noCursorTimeout": False,
        "maxTimeMS": READ_MS,
    }
    if collection.uuid is not None:
        # For another collection of the same name, such as one that was dropped and created again, the server answers with error 361.
        command["collectionUUID"] = collection.uuid
    # In index order: a chunk that is cut ends at an `_id`, and the server sorts nothing in memory.
    command["sort"] = command["hint"] = {"_id": 1}
    if collection.is_capped:
        # `majority`: an election may roll back other writes without an event, and bronze would keep them.
        command["readConcern"] = {"level": "majority", "afterClusterTime": after}
    else:
        command["readConcern"] = {"level": "snapshot", "atClusterTime" if is_exact else "afterClusterTime": after}
    return command


def refusal_of_filter(connection: pymongo.MongoClient[Any], namespace: str, condition: Mapping[str, Any]) -> str | None:
    """The reason for which the server refuses a filter over `database.collection`; None where it accepts it. Reads no documents."""
    db, _, name = namespace.partition(".")
    # Not `explain`, whose reply quotes the filter several times: with a filter of some MB it is too large to send.
    command = {"find": name, "filter": dict(condition), "batchSize": 0, "singleBatch": True, "maxTimeMS": PLAN_MS}
    try:
        with mongodb_failures.translating("trying a filter"), contextlib.suppress(driver.ExecutionTimeout):
            connection[db].command(command, codec_options=cursor_reply.LENIENT)
            return None
        return f"it takes more than {PLAN_MS // 1000} seconds for a few documents"
    except driver.OperationFailure as error:
        return mongodb_failures.first_line(error)
    except errors.AccessRefused as error:
        # A small cluster refuses operators such as `$where` with the same code.
        if getattr(error.__cause__, "code", None) != mongodb_failures.ATLAS_REFUSED:
            raise
        return str(error)
    except driver.DocumentTooLarge:
        return "it is larger than a command may be"
    except mongodb_failures.CollectionChanged:  # The collection was just dropped.
        return None
