"""Document keys: of a sample of a collection, and of its changes between two times."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import pymongo
from bson.raw_bson import RawBSONDocument
from bson.timestamp import Timestamp

from cdc_core import errors
from cdc_core.stream import resume_token
from pipelines.mongodb import catalog, change_stream, cursor_reply
from pipelines.mongodb import failures as mongodb_failures


def sampled_ids(
    connection: pymongo.MongoClient[Any],
    collection: catalog.SourceCollection,
    *,
    documents: int,
    condition: Mapping[str, Any] | None = None,
) -> list[bytes]:
    """A random sample of a collection, or of the documents that match a condition: raw documents with only their `_id`.

    At most `documents`, each once.
    """
    match_stages: list[Mapping[str, Any]] = [{"$match": condition}] if condition else []
    stages = [*match_stages, {"$sample": {"size": documents}}, {"$project": {"_id": 1}}]
    with mongodb_failures.translating_read(f"choosing documents of {collection.namespace}"):
        sample = cursor_reply.drained(
            connection,
            collection.db,
            {"aggregate": collection.name, "pipeline": stages, "cursor": {}},
            codec_options=cursor_reply.RAW,
            read_preference=connection.read_preference,
        )
        # A set: `$sample` may return a document more than once.
        return list({bytes(document.raw) for document in sample})


CATCH_UP_SECONDS = 60.0
"""Seconds to wait for the stream to reach the time: a quiet server moves its change streams every ten seconds."""


class NamespaceGone(Exception):
    """The collection was dropped, renamed or replaced between the two times."""


def changed_keys(
    connection: pymongo.MongoClient[Any], db: str, name: str, *, behind: str, until: Timestamp, limit: int
) -> list[bytes]:
    """The raw document keys of a collection's changes after the token `behind` and up to a cluster time; at most about `limit`.

    Raises `HistoryLost`, `NamespaceGone`, or `SourceUnreachable` where the stream does not reach the time.
    """
    position = resume_token.position(behind)
    # `$out` and a rename with `dropTarget` replace this collection with an event of the other one only.
    replacement = {"operationType": "rename", "to.coll": name}
    stages: list[Mapping[str, Any]] = [
        {"$match": {"$or": [{"ns.coll": name}, replacement, {"operationType": {"$in": ["dropDatabase", "invalidate"]}}]}},
        {"$project": {"operationType": 1, "documentKey": 1, "clusterTime": 1}},
    ]
    options = change_stream.StreamOptions(db=db, stages=stages, max_await_ms=200, show_expanded_events=False)
    deadline = time.monotonic() + CATCH_UP_SECONDS
    stream = change_stream.ChangeStream(
        connection, options, change_stream.StreamStart(at=Timestamp(position.seconds, position.increment)), retries=3
    )
    keys: list[bytes] = []
    try:
        is_settled = False
        while not is_settled and len(keys) < limit:
            batch = stream.next()
            if not batch.events and time.monotonic() > deadline:
                raise errors.SourceUnreachable(f"{db}.{name}: the change stream has not reached the time of the read")
            for event in map(RawBSONDocument, batch.events):
                if resume_token.compare(event["_id"]["_data"], behind) <= 0 or event["clusterTime"] > until:
                    continue
                if "documentKey" not in event:
                    raise NamespaceGone
                keys.append(bytes(event["documentKey"].raw))
            batch_position = resume_token.position(batch.token)
            # At exactly that time there may be more events until the stream is drained.
            is_past = (batch_position.seconds, batch_position.increment) > (until.time, until.inc)
            is_settled = is_past or (
                (batch_position.seconds, batch_position.increment) == (until.time, until.inc) and batch.is_drained
            )
    finally:
        stream.close()
    return keys
