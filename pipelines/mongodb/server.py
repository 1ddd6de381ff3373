"""What the server says of itself: its version, its cluster time, and how far its oplog reaches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pymongo
from bson.timestamp import Timestamp
from pymongo import errors as driver

from cdc_core import errors
from pipelines.mongodb import failures as mongodb_failures


class ServerInfo(NamedTuple):
    """What `hello` and `buildInfo` say of the server."""

    version: tuple[int, ...]
    is_replica_set: bool
    is_sharded: bool
    replica_set: str | None = None
    """The replica set's name; None behind mongos."""

    @property
    def text(self) -> str:
        return ".".join(map(str, self.version[:3]))


def server_info(connection: pymongo.MongoClient[Any]) -> ServerInfo:
    """Ask the server what it is; raises `SourceUnreachable` or `AccessRefused`."""
    with mongodb_failures.translating("connecting to MongoDB"):
        hello = connection.admin.command("hello")
        build = connection.admin.command("buildInfo")
    return ServerInfo(
        tuple(int(part) for part in build["versionArray"]),
        "setName" in hello,
        hello.get("msg") == "isdbgrid",
        hello.get("setName"),
    )


def check_suitable(info: ServerInfo) -> None:
    """Raise `SourceUnsuitable` for a standalone server or one before 6.0."""
    if not (info.is_replica_set or info.is_sharded):
        raise errors.SourceUnsuitable(
            "connecting to MongoDB: this server is not a replica set, which change streams need; start mongod with "
            "--replSet and run rs.initiate(), or connect to the replica set"
        )
    if info.version < (6, 0):
        raise errors.SourceUnsuitable(
            f"connecting to MongoDB: the server has version {info.text}; mongo-medallion needs 6.0 or later"
        )


def operation_time(connection: pymongo.MongoClient[Any]) -> Timestamp:
    """The cluster time of the newest operation that the server has applied."""
    with mongodb_failures.translating("reading the operation time"):
        reply = connection.admin.command("ping")
    return reply["operationTime"]


def may_watch_deployment(connection: pymongo.MongoClient[Any]) -> bool:
    """Whether the user may open a change stream over all databases."""
    try:
        # `batchSize` 0: the server checks the right, and reads nothing.
        with connection.admin.aggregate([{"$changeStream": {"allChangesForCluster": True}}], batchSize=0):
            return True
    except driver.OperationFailure as error:
        if error.code in (mongodb_failures.UNAUTHORIZED, mongodb_failures.ONLY_ON_REPLICA_SETS):
            return False
        raise mongodb_failures.translated(error, "opening the change stream") from error
    except driver.PyMongoError as error:
        raise mongodb_failures.translated(error, "opening the change stream") from error


class OplogWindow(NamedTuple):
    """The cluster times, in seconds, between which the oplog holds entries."""

    first: int
    last: int


def oplog_window(connection: pymongo.MongoClient[Any]) -> OplogWindow | None:
    """How far back the oplog reaches, or None where the user may not know (it needs clusterMonitor); raises `SourceUnreachable`."""
    with mongodb_failures.translating("asking how far back the oplog reaches"):
        try:
            status = connection.admin.command({"serverStatus": 1, "oplog": 1, "metrics": 0})
            oplog = status.get("oplog")
            return OplogWindow(oplog["earliestOptime"].time, oplog["latestOptime"].time) if oplog else None
        except (driver.OperationFailure, KeyError):
            return None


LEAST_WINDOW_SECONDS = 60
"""A shorter oplog does not show how fast it is filled: it counts as that long."""


@dataclass(frozen=True)
class Oplog:
    """The oplog as it stands: cluster times in seconds, sizes in bytes, and how long entries are kept at least."""

    window: OplogWindow
    size: int
    max_size: int
    retention_seconds: float = 0.0

    def headroom_seconds(self, position: int) -> float:
        """How long until the position would fall off, if nothing read on and writes went on as they have.

        An oplog that is not full loses nothing yet: what still fits counts at the rate at which it was filled.
        """
        length = max(self.window.last - self.window.first, LEAST_WINDOW_SECONDS)
        room = length * (self.max_size / self.size - 1) if self.size else 0.0
        by_size = position - self.window.first + max(0.0, room)
        # The server keeps entries of the last `oplogMinRetentionHours` even where the oplog is full.
        by_time = self.retention_seconds - (self.window.last - position)
        return max(by_size, by_time)


def oplog(connection: pymongo.MongoClient[Any]) -> Oplog | None:
    """The oplog; None where there is none (mongos), the user may not read it (that takes clusterMonitor), or the server
    does not answer."""
    try:
        window = oplog_window(connection)
        if window is None:
            return None
        status = connection.admin.command({"serverStatus": 1, "metrics": 0})
        stats = connection.local.command({"collStats": "oplog.rs"})
    except (driver.PyMongoError, errors.SourceUnreachable):
        return None
    hours = status.get("oplogTruncation", {}).get("oplogMinRetentionHours", 0)
    return Oplog(window, int(stats["size"]), int(stats["maxSize"]), float(hours) * 3600)
