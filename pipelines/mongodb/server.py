"""The server's version, its operation time, and its oplog."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pymongo
from bson.timestamp import Timestamp
from pymongo import errors as driver

from cdc_core import errors
from pipelines.mongodb import client as mongodb
from pipelines.mongodb import failures as mongodb_failures


class ServerInfo(NamedTuple):
    """The server's version and kind, from `hello` and `buildInfo`."""

    version: tuple[int, ...]
    is_sharded: bool
    replica_set: str | None = None
    """The replica set's name; None for a mongos, and for a standalone server."""

    @property
    def text(self) -> str:
        return ".".join(map(str, self.version[:3]))


def server_info(connection: pymongo.MongoClient[Any]) -> ServerInfo:
    """The server's version and kind; raises `SourceUnreachable` or `AccessRefused`.

    Raises `SourceUnsuitable` if all servers of the connection string answer, and none is of its `replicaSet`.
    """
    try:
        with mongodb_failures.translating("connecting to MongoDB"):
            hello = connection.admin.command("hello")
            build = connection.admin.command("buildInfo")
    except errors.SourceUnreachable:
        # The driver leaves out servers that are not of the set, so to it they are as if they did not answer.
        _refuse_other_sets(connection)
        raise
    return ServerInfo(
        tuple(int(part) for part in build["versionArray"]),
        hello.get("msg") == "isdbgrid",
        hello.get("setName"),
    )


def _refuse_other_sets(connection: pymongo.MongoClient[Any]) -> None:
    """Raise `SourceUnsuitable` if all servers of the connection string answer, and none is of its `replicaSet`.

    Raises `SourceUnreachable` if one belongs to a replica set without a configuration.
    """
    wanted = connection.options.replica_set_name
    hello: dict[str, Any] = {}
    try:
        for server in mongodb.seeds(connection):
            hello = server.admin.command("hello")
            if hello.get("isreplicaset"):
                # Temporary: a server that starts has not read its configuration yet.
                raise errors.SourceUnreachable(
                    "connecting to MongoDB: the server was started with --replSet, and has no configuration yet; if it is "
                    "new, run rs.initiate() on it, or else wait"
                )
            if wanted is None or hello.get("setName") == wanted:
                return
    except driver.PyMongoError:
        return
    if "setName" not in hello and hello.get("msg") != "isdbgrid":
        raise _standalone()
    found = f"is of the replica set {hello['setName']}" if "setName" in hello else "is a mongos"
    raise errors.SourceUnsuitable(
        f"connecting to MongoDB: the server {found}, and replicaSet in the connection string is {wanted}; correct it or leave it out"
    )


def _standalone() -> errors.SourceUnsuitable:
    return errors.SourceUnsuitable(
        "connecting to MongoDB: this server is not a replica set, which change streams need; start mongod with "
        "--replSet and run rs.initiate(), or connect to the replica set"
    )


def check_suitable(info: ServerInfo) -> None:
    """Raise `SourceUnsuitable` for a standalone server, or one older than MongoDB 6.0."""
    if not (info.replica_set or info.is_sharded):
        raise _standalone()
    if info.version < (6, 0):
        raise errors.SourceUnsuitable(
            f"connecting to MongoDB: the server has version {info.text}; mongo-medallion needs 6.0 or later"
        )


def operation_time(connection: pymongo.MongoClient[Any]) -> Timestamp:
    """The cluster time of the newest operation that the server has applied. Raises `SourceUnreachable` if it does not tell it."""
    with mongodb_failures.translating("reading the operation time"):
        reply = connection.admin.command("ping")
        if "operationTime" in reply:
            return reply["operationTime"]
        # A server with users signs its times, and sends none until it has read the keys for that, a moment after its start.
        last_write = connection.admin.command("hello").get("lastWrite", {})
    if "opTime" not in last_write:
        raise errors.SourceUnreachable("reading the operation time: the server does not tell it; it may have just started")
    return last_write["opTime"]["ts"]


def may_watch_deployment(connection: pymongo.MongoClient[Any]) -> bool:
    """Whether the user may open a change stream over all databases."""
    with mongodb_failures.translating("opening the change stream"):
        try:
            # `batchSize` 0: the server checks the privilege, and reads nothing.
            with connection.admin.aggregate([{"$changeStream": {"allChangesForCluster": True}}], batchSize=0):
                return True
        except driver.OperationFailure as error:
            if error.code not in (mongodb_failures.UNAUTHORIZED, mongodb_failures.ONLY_ON_REPLICA_SETS):
                raise
            return False


class OplogWindow(NamedTuple):
    """The cluster times, in seconds, between which the oplog holds entries."""

    first: int
    last: int


def oplog_window(connection: pymongo.MongoClient[Any]) -> OplogWindow | None:
    """The oplog's window; None where the user lacks clusterMonitor, or for a mongos. Raises `SourceUnreachable`."""
    with mongodb_failures.translating("asking how far back the oplog reaches"):
        return window(connection)


def window(connection: pymongo.MongoClient[Any]) -> OplogWindow | None:
    """As `oplog_window`, but raises the driver's error, after which a change stream is resumed."""
    try:
        status = connection.admin.command({"serverStatus": 1, "oplog": 1, "metrics": 0})
        oplog = status.get("oplog")
        return OplogWindow(oplog["earliestOptime"].time, oplog["latestOptime"].time) if oplog else None
    except (driver.OperationFailure, KeyError):
        return None


LEAST_WINDOW_SECONDS = 60
"""The least length of the oplog by which its rate is estimated."""


@dataclass(frozen=True)
class Oplog:
    """The current oplog: its window, its size and maximum size in bytes, and `oplogMinRetentionHours` in seconds."""

    window: OplogWindow
    size: int
    max_size: int
    retention_seconds: float = 0.0

    def headroom_seconds(self, position: int) -> float:
        """Seconds until the oplog would lose the position, if the capture stopped and writes continued at their average rate.

        The unused part of the oplog counts at the same rate.
        """
        length = max(self.window.last - self.window.first, LEAST_WINDOW_SECONDS)
        room = length * (self.max_size / self.size - 1) if self.size else 0.0
        by_size = position - self.window.first + max(0.0, room)
        # The server keeps the entries of the last `oplogMinRetentionHours` even when the oplog is full.
        by_time = self.retention_seconds - (self.window.last - position)
        return max(by_size, by_time)


def oplog(connection: pymongo.MongoClient[Any]) -> Oplog | None:
    """The current oplog; None for a mongos, where the user lacks clusterMonitor, or where the server does not answer."""
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
