"""The server's catalog: its databases and collections, and their approximate sizes."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pymongo
from bson.errors import InvalidBSON
from pymongo import errors as driver

from cdc_core.stream import filters
from pipelines.mongodb import cursor_reply
from pipelines.mongodb import failures as mongodb_failures

log = logging.getLogger(__name__)


def database_names(connection: pymongo.MongoClient[Any]) -> list[str]:
    """The databases that the user may see, without the server's own; none where the user lacks the privilege to list them.

    Without those whose names are not UTF-8: the server accepts such names, and no driver can send them.
    """
    with mongodb_failures.translating("listing the databases"):
        try:
            return [name for name in _database_names(connection) if name not in filters.BUILT_IN and _is_usable(name)]
        except driver.OperationFailure as error:
            if error.code != mongodb_failures.UNAUTHORIZED:
                raise
            return []


def _database_names(connection: pymongo.MongoClient[Any]) -> list[str]:
    try:
        return connection.list_database_names()  # The driver repeats it after a network error.
    except InvalidBSON:
        command = {"listDatabases": 1, "nameOnly": True}
        return [entry["name"] for entry in connection.admin.command(command, codec_options=cursor_reply.NAMES)["databases"]]


def _is_usable(name: str) -> bool:
    """Whether a name, decoded with `cursor_reply.NAMES`, is UTF-8; one that is not is logged once."""
    try:
        name.encode()
    except UnicodeEncodeError:
        _warn_once(name.encode("utf-8", "surrogateescape"))
        return False
    return True


@functools.lru_cache(maxsize=1000)
def _warn_once(raw_name: bytes) -> None:
    log.warning(
        "left out: the name %s of a database or collection is not UTF-8, and cannot be read; rename it", ascii(raw_name)
    )


@dataclass(frozen=True)
class SourceCollection:
    """A collection, view or time-series collection of the source."""

    db: str
    name: str
    uuid: Any
    is_capped: bool = False
    kind: str = "collection"
    has_images: bool = False
    is_clustered: bool = False
    """Whether it is a clustered collection: stored in the order of `_id`, without a separate index on it."""

    @property
    def namespace(self) -> str:
        return f"{self.db}.{self.name}"


def collections(connection: pymongo.MongoClient[Any], databases: Sequence[str]) -> list[SourceCollection]:
    """All collections, views and time-series collections of the databases, without the server's own, and without those whose
    names are not UTF-8, of which change streams have no events either."""
    with mongodb_failures.translating("listing the collections"):
        return [
            _collection(db, entry)
            for db in sorted(databases)
            if db not in filters.BUILT_IN
            for entry in sorted(_listed(connection, db), key=lambda entry: entry["name"])
            if not entry["name"].startswith("system.") and _is_usable(entry["name"])
        ]


def _listed(connection: pymongo.MongoClient[Any], db: str) -> list[Mapping[str, Any]]:
    """The entries of `listCollections`; none for a name that no database can have, such as a regular expression that is read
    literally, or one that is too long. The driver's own method decodes them strictly, whatever the database's codec."""
    try:
        return cursor_reply.drained(connection, db, {"listCollections": 1, "cursor": {}}, codec_options=cursor_reply.NAMES)
    except driver.InvalidName:
        return []
    except driver.OperationFailure as error:
        if error.code != mongodb_failures.INVALID_NAMESPACE:
            raise
        return []


def _collection(db: str, entry: Mapping[str, Any]) -> SourceCollection:
    options = entry.get("options", {})
    return SourceCollection(
        db,
        entry["name"],
        entry.get("info", {}).get("uuid"),
        bool(options.get("capped")),
        entry.get("type", "collection"),
        bool(options.get("changeStreamPreAndPostImages", {}).get("enabled")),
        bool(options.get("clusteredIndex")),
    )


@dataclass(frozen=True)
class CollectionSize:
    """The approximate number of documents of a collection, and their average size in bytes."""

    documents: int
    average: int


UNKNOWN_AVERAGE = 1024


def size(connection: pymongo.MongoClient[Any], collection: SourceCollection) -> CollectionSize:
    """The server's own estimate; an unknown average counts as 1 KiB, also that of a user who may find and lacks `collStats`."""
    preference = connection.read_preference
    with mongodb_failures.translating_read(f"measuring {collection.namespace}"):
        try:
            stats = cursor_reply.drained(
                connection,
                collection.db,
                {"aggregate": collection.name, "pipeline": [{"$collStats": {"storageStats": {}}}], "cursor": {}},
                codec_options=cursor_reply.LENIENT,
                read_preference=preference,
            )
        except driver.OperationFailure as error:
            if error.code not in (mongodb_failures.UNAUTHORIZED, mongodb_failures.ATLAS_REFUSED):
                raise
            # Without a filter the server returns the number that it keeps, and reads no documents.
            count = connection[collection.db].command({"count": collection.name}, read_preference=preference)
            return CollectionSize(int(count["n"]), UNKNOWN_AVERAGE)
    # One entry per shard.
    documents = sum(int(shard["storageStats"].get("count", 0)) for shard in stats)
    total_bytes = sum(int(shard["storageStats"].get("size", 0)) for shard in stats)
    return CollectionSize(documents, max(1, total_bytes // documents) if documents else UNKNOWN_AVERAGE)
