"""MongoDB: the only module that uses pymongo's client.

It opens clients, change streams and snapshot reads, and turns the driver's errors into ours. Change streams and chunks
are read with raw commands, because a batch that stays bytes costs a tenth of one that becomes objects; what the driver's
own change stream decides (which errors are resumable, where to resume) is decided here by the same rules
(MongoDB specification "Change Streams", section "Resumable Error").
"""

from __future__ import annotations

import functools
import logging
import re
import struct
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pymongo
from bson import decode
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.int64 import Int64
from bson.raw_bson import DEFAULT_RAW_BSON_OPTIONS, RawBSONDocument
from bson.timestamp import Timestamp
from pymongo import common
from pymongo import errors as driver
from pymongo.read_preferences import ReadPreference

from cdc_core import errors
from cdc_core.extended_json import raw_bson
from cdc_core.stream import resume_token, split_events

log = logging.getLogger(__name__)

Client = pymongo.MongoClient[dict[str, Any]]

APP_NAME = "mongo-medallion"
EXACT: CodecOptions[dict[str, Any]] = CodecOptions(datetime_conversion=DatetimeConversion.DATETIME_MS)
LENIENT: CodecOptions[dict[str, Any]] = CodecOptions(
    datetime_conversion=DatetimeConversion.DATETIME_MS, unicode_decode_error_handler="replace"
)
"""For replies that quote what a user wrote (validators, views, filters) and of which that part is not looked at."""

_int32 = struct.Struct("<i").unpack_from

AUTHENTICATION_FAILED = 18
UNAUTHORIZED = 13
CURSOR_NOT_FOUND = 43
CURSOR_LOST = (CURSOR_NOT_FOUND, 175, 237)
"""The codes of a cursor that is gone: not found, its plan killed (the collection was dropped), killed."""
KILLED = frozenset({*CURSOR_LOST, 11601, 206, 279})
"""The codes of an operation that was killed, by itself or with its cursor, its session or its connection."""
TRANSIENT = frozenset(
    {
        # The change stream specification's resumable errors, for a server that does not label them.
        *(6, 7, 63, 89, 91, 133, 150, 189, 234, 262, 9001, 10107, 11600, 11602, 13388, 13435, 13436),
        # What an operator does to an operation, its cursor or its session, and what passes by itself (locks, time
        # limits, conflicts, full pools, tickets): nobody is at a capture's terminal to start it again.
        *KILLED,
        *(24, 46, 50, 112, 134, 202, 290, 365),
    }
)
"""The codes of an operation that was interrupted and can be done again: the one list, of streams, chunks and all the rest."""
CHANGE_STREAM_FATAL = 280
CHANGE_STREAM_HISTORY_LOST = 286
INVALID_RESUME_TOKEN = 260
OVERSIZE = 10334
ONLY_ON_REPLICA_SETS = 40573
SNAPSHOT_TOO_OLD = 239
SNAPSHOT_UNAVAILABLE = 246
NAMESPACE_UUID_MISMATCH = 361
_ABOUT_THE_STREAM = frozenset(
    {
        UNAUTHORIZED, AUTHENTICATION_FAILED, ONLY_ON_REPLICA_SETS, CHANGE_STREAM_FATAL, CHANGE_STREAM_HISTORY_LOST,
        INVALID_RESUME_TOKEN,
    }
)  # fmt: skip


class HistoryLost(Exception):
    """The oplog no longer holds the position (286), or the server refuses its token (280, 260)."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class SnapshotExpired(Exception):
    """A chunk outlived the server's window of snapshot reads, or began before it (239, 246): read it again, smaller."""


class CollectionChanged(Exception):
    """The collection that a chunk was planned for was renamed, dropped or made anew in between."""


class ReadRefused(Exception):
    """The server refuses a read of a collection, and would again: a filter that fails on a document, say.

    The text has the server's code and our words: its own may quote a document.
    """


def client(uri: str, *, is_known: bool = False, **options: Any) -> pymongo.MongoClient[dict[str, Any]]:
    """A client for a connection string; raises `SettingsError` for one that cannot be used.

    Raises `SourceUnreachable` where the SRV record of mongodb+srv:// cannot be looked up now; that there is none is a mistake in
    the settings only as long as nobody has found one: in this process, or elsewhere (`is_known`).
    """
    try:
        with warnings.catch_warnings(record=True) as said:  # the driver's words quote the values
            warnings.simplefilter("always")
            made: pymongo.MongoClient[dict[str, Any]] = pymongo.MongoClient(uri, **{"appname": APP_NAME, **options})
        if said:
            _tell_left_out(tuple(name for name, value in _given(uri).items() if not _is_valid(name, value)))
        _looked_up.add(_host(uri))
        return made
    except (driver.ConfigurationError, driver.InvalidURI, ValueError, TypeError) as error:
        if uri.startswith("mongodb+srv://") and _is_lookup(error, is_known=is_known or _host(uri) in _looked_up):
            raise errors.SourceUnreachable(
                "source.mongodb.connection.string: its SRV record could not be looked up "
                f"({type(error.__cause__).__name__}); does the name server answer?"
            ) from None
        raise _unusable(uri, options) from None


_looked_up: set[str] = set()
"""The hosts of connection strings that this process has made clients of."""


def _is_lookup(error: Exception, *, is_known: bool) -> bool:
    """Whether a name server failed, and not the connection string: its answer that there is no such name is no failure."""
    from dns import exception, resolver

    is_answer = isinstance(error.__cause__, (resolver.NXDOMAIN, resolver.NoAnswer))
    return isinstance(error.__cause__, (exception.DNSException, OSError)) and (is_known or not is_answer)


def _host(uri: str) -> str:
    return re.split(r"[/?]", uri.partition("://")[2].rpartition("@")[2], maxsplit=1)[0]


def _unusable(uri: str, options: Mapping[str, Any]) -> errors.SettingsError:
    """What is wrong with a connection string or an option, in our words: the driver's quote the string, password and all."""
    path = "source.mongodb.connection.string"
    scheme, found, _ = uri.partition("://")
    if not found or scheme not in ("mongodb", "mongodb+srv"):
        return errors.SettingsError(errors.Problem(path, "it must begin with mongodb:// or mongodb+srv://"))
    bad = [name for name, value in {**_given(uri), **options}.items() if not _is_valid(name, value)]
    if bad:
        return errors.SettingsError(errors.Problem(path, f"the value of {', '.join(bad)} cannot be used"))
    hint = "in a user name or password / : @ ? # [ ] and % are percent-encoded: p@ss is written p%40ss"
    if scheme == "mongodb+srv":
        hint += "; the host of mongodb+srv:// must have an SRV record, and no port"
    return errors.SettingsError(errors.Problem(path, "it cannot be read as a connection string", hint))


def _given(uri: str) -> dict[str, str]:
    """The options of a connection string."""
    options = (part.partition("=") for part in uri.partition("://")[2].partition("?")[2].split("&") if "=" in part)
    return {name: value for name, _, value in options if name.isalnum()}


@functools.lru_cache
def _tell_left_out(names: tuple[str, ...]) -> None:
    """Once a process: the driver goes on without an option that it does not know, or whose value it cannot use."""
    log.warning(
        "source.mongodb.connection.string: left out, unknown or with an unfit value: %s", ", ".join(names) or "an option"
    )


def _is_valid(name: str, value: object) -> bool:
    try:
        common.validate(name, value)
    except Exception:  # whatever the driver says of it
        return False
    return True


CLOSE_SECONDS = 2.0


def close(connection: pymongo.MongoClient[Any]) -> None:
    """Close a client, which tells the server of the end of its sessions; one that does not answer is not waited for."""
    closing = threading.Thread(target=connection.close, name="mongodb-close", daemon=True)
    closing.start()
    closing.join(CLOSE_SECONDS)


@contextmanager
def translating(what: str = "MongoDB") -> Iterator[None]:
    """Driver errors inside the block leave it as ours; `what` says what was being done."""
    try:
        yield
    except driver.PyMongoError as error:
        raise translated(error, what) from error


def translated(error: driver.PyMongoError, what: str) -> BaseException:
    """One driver error as one of ours, by class and code."""
    code = getattr(error, "code", None)
    if _spoils_tokens(error):
        return errors.SettingsError(
            errors.Problem(
                "source.cursor.pipeline",
                "its stages change _id, the token of an event, and without that no stream can go on; the position did not move",
                "leave _id as it is",
            )
        )
    match code:
        case 18:
            return errors.AccessRefused(
                f"{what}: the server refused user name or password (error 18); "
                "check the connection string's secret and authSource"
            )
        case 13:
            return errors.AccessRefused(
                f"{what}: the user lacks a right (error 13{_refused_command(error)}); "
                "`medallion check` lists each missing right"
            )
        case 40573:
            return errors.SourceUnsuitable(
                f"{what}: this server is no replica set, and change streams need one; "
                "start mongod with --replSet and initiate it, or connect to the replica set"
            )
        case 10334:
            return errors.SourceUnsuitable(
                f"{what}: an event is larger than 16 MB (error 10334); nothing is lost. Set "
                "source.cursor.oversize.handling.mode to split (server 6.0.9 or later) or skip, and start again"
            )
        case 286 | 280 | 260:
            return HistoryLost(code)
        case 239 | 246:
            return SnapshotExpired()
        case 361 | 26:
            return CollectionChanged()
    if isinstance(error, driver.ServerSelectionTimeoutError):
        if _refused_at_handshake(error):
            return errors.AccessRefused(f"{what}: the server refused user name or password; check the secret")
        return errors.SourceUnreachable(
            f"{what}: no server answered in time: {_first_line(error)}; is it running, and the host right?"
        )
    if isinstance(error, driver.NotPrimaryError):
        return errors.SourceUnreachable(f"{what}: the server is no longer the primary")
    if isinstance(error, (driver.ConnectionFailure, driver.WaitQueueTimeoutError)):
        return errors.SourceUnreachable(f"{what}: the connection failed: {_first_line(error)}")
    if is_resumable(error):
        return errors.SourceUnreachable(f"{what}: the server interrupted the operation (error {code}); start again")
    if isinstance(error, driver.ConfigurationError):
        hint = "is the server MongoDB 6.0 or later, do its options fit it, and has the host of mongodb+srv:// an SRV record?"
        message = f"{what}: the driver cannot use this server with it ({type(error).__name__})"
        return errors.SettingsError(errors.Problem("source.mongodb.connection.string", message, hint))
    return error


def has_lost_connection(error: BaseException) -> bool:
    """Whether an error of ours tells that no server answered, and not that one answered that it cannot now."""
    return isinstance(error.__cause__, driver.ConnectionFailure)


def is_resumable(error: BaseException) -> bool:
    """Whether a change stream goes on after this error: by the driver's labels, an interruption, or the network."""
    if isinstance(error, (driver.ConnectionFailure, driver.CursorNotFound)):
        return True
    return isinstance(error, driver.OperationFailure) and (
        error.has_error_label("ResumableChangeStreamError") or error.code in TRANSIENT
    )


def _is_about_an_event(error: BaseException) -> bool:
    """Whether the server failed at an event, and not at the stream: those before it can be read one by one."""
    return isinstance(error, driver.OperationFailure) and error.code not in _ABOUT_THE_STREAM


def _spoils_tokens(error: BaseException) -> bool:
    """Whether this is the server's word for a stage that changes an event's `_id`; it has the code of a lost position."""
    return isinstance(error, driver.OperationFailure) and "modified by the pipeline" in str(error)


class ServerInfo(NamedTuple):
    """What `hello` and `buildInfo` say of the server."""

    version: tuple[int, ...]
    is_replica_set: bool
    is_sharded: bool

    @property
    def text(self) -> str:
        return ".".join(map(str, self.version[:3]))


def server_info(connection: pymongo.MongoClient[Any]) -> ServerInfo:
    """Ask the server what it is; raises `SourceUnreachable` or `AccessRefused`."""
    with translating("connecting to MongoDB"):
        hello = connection.admin.command("hello")
        build = connection.admin.command("buildInfo")
    return ServerInfo(
        tuple(int(part) for part in build["versionArray"]),
        "setName" in hello,
        hello.get("msg") == "isdbgrid",
    )


def check_suitable(info: ServerInfo) -> None:
    """Raise `SourceUnsuitable` for a standalone server or one before 6.0."""
    if not (info.is_replica_set or info.is_sharded):
        raise errors.SourceUnsuitable(
            "connecting to MongoDB: this server is no replica set, and change streams need one; "
            "start mongod with --replSet and run rs.initiate(), or connect to the replica set"
        )
    if info.version < (6, 0):
        raise errors.SourceUnsuitable(
            f"connecting to MongoDB: the server is version {info.text}; mongo-medallion needs 6.0 or later"
        )


def operation_time(connection: pymongo.MongoClient[Any]) -> Timestamp:
    """The cluster time of the newest operation that the server has applied."""
    with translating("reading the operation time"):
        reply = connection.admin.command("ping")
    return reply["operationTime"]


def may_watch_deployment(connection: pymongo.MongoClient[Any]) -> bool:
    """Whether the user may open a change stream over all databases."""
    try:
        with connection.admin.aggregate([{"$changeStream": {"allChangesForCluster": True}}], batchSize=0):
            return True
    except driver.OperationFailure as error:
        if error.code in (UNAUTHORIZED, ONLY_ON_REPLICA_SETS):
            return False
        raise translated(error, "opening the change stream") from error
    except driver.PyMongoError as error:
        raise translated(error, "opening the change stream") from error


def database_names(connection: pymongo.MongoClient[Any]) -> list[str]:
    """The databases that the user may see, without the server's own; none where that right is missing."""
    try:
        names = connection.list_database_names()
    except driver.OperationFailure as error:
        if error.code == UNAUTHORIZED:
            return []
        raise translated(error, "listing the databases") from error
    except driver.PyMongoError as error:
        raise translated(error, "listing the databases") from error
    return [name for name in names if name not in ("admin", "config", "local")]


class OplogWindow(NamedTuple):
    """The cluster times, in seconds, between which the oplog holds entries."""

    first: int
    last: int


def oplog_window(connection: pymongo.MongoClient[Any]) -> OplogWindow | None:
    """How far back the oplog reaches, or None where the user may not know (it needs clusterMonitor)."""
    try:
        status = connection.admin.command({"serverStatus": 1, "oplog": 1, "metrics": 0})
        oplog = status.get("oplog")
        return OplogWindow(oplog["earliestOptime"].time, oplog["latestOptime"].time) if oplog else None
    except (driver.OperationFailure, KeyError):
        return None


YOUNG_SECONDS = 60
"""A shorter oplog says nothing about how fast it is filled: it counts as that long."""


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
        length = max(self.window.last - self.window.first, YOUNG_SECONDS)
        room = length * (self.max_size / self.size - 1) if self.size else 0.0
        by_size = position - self.window.first + max(0.0, room)
        by_time = self.retention_seconds - (self.window.last - position)
        return max(by_size, by_time)


def oplog(connection: pymongo.MongoClient[Any]) -> Oplog | None:
    """The oplog; None where there is none to see (mongos), the user may not (it needs clusterMonitor), or nobody answers."""
    try:
        window = oplog_window(connection)
        if window is None:
            return None
        status = connection.admin.command({"serverStatus": 1, "metrics": 0})
        stats = connection.local.command({"collStats": "oplog.rs"})
    except driver.PyMongoError:
        return None
    hours = status.get("oplogTruncation", {}).get("oplogMinRetentionHours", 0)
    return Oplog(window, int(stats["size"]), int(stats["maxSize"]), float(hours) * 3600)


@dataclass(frozen=True)
class Collection:
    """One collection of the source: what a snapshot and the filters need to know of it."""

    db: str
    name: str
    uuid: Any
    is_capped: bool = False
    kind: str = "collection"
    has_images: bool = False
    is_clustered: bool = False
    """Whether its documents lie in the order of `_id`, and there is no other index of it."""

    @property
    def namespace(self) -> str:
        return f"{self.db}.{self.name}"


def collections(connection: pymongo.MongoClient[Any], databases: Sequence[str] | None = None) -> list[Collection]:
    """All collections, views and time-series of the given databases (None: of all but the server's own)."""
    with translating("listing the collections"):
        names = list(databases) if databases is not None else connection.list_database_names()
        return [
            _collection(db, entry)
            for db in sorted(names)
            if db not in ("admin", "config", "local")
            for entry in sorted(_listed(connection, db), key=lambda entry: entry["name"])
            if not entry["name"].startswith("system.")
        ]


def _listed(connection: pymongo.MongoClient[Any], db: str) -> list[Mapping[str, Any]]:
    """What `listCollections` says; the driver's own method reads it strictly, whatever codec the database has."""
    database = connection.get_database(db, codec_options=LENIENT)
    return list(database.cursor_command({"listCollections": 1, "cursor": {}}, codec_options=LENIENT))


def _collection(db: str, entry: Mapping[str, Any]) -> Collection:
    options = entry.get("options", {})
    return Collection(
        db,
        entry["name"],
        entry.get("info", {}).get("uuid"),
        bool(options.get("capped")),
        entry.get("type", "collection"),
        bool(options.get("changeStreamPreAndPostImages", {}).get("enabled")),
        bool(options.get("clusteredIndex")),
    )


@dataclass(frozen=True)
class Size:
    """About how many documents a collection holds, and how long one is on average, in bytes."""

    documents: int
    average: int


def size(connection: pymongo.MongoClient[Any], collection: Collection) -> Size:
    """The server's own estimate; an unknown average counts as 1 KiB."""
    with _reading_whole(f"measuring {collection.namespace}"):
        pipeline: list[Mapping[str, Any]] = [{"$collStats": {"storageStats": {}}}]
        stats = list(connection[collection.db][collection.name].aggregate(pipeline))
    documents = sum(int(shard["storageStats"].get("count", 0)) for shard in stats)
    total = sum(int(shard["storageStats"].get("size", 0)) for shard in stats)
    return Size(documents, max(1, total // documents) if documents else 1024)


# --- change streams ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StreamOptions:
    """What the change stream is opened with; `stages` follow `$changeStream` on the server."""

    db: str | None = None
    collection: str | None = None
    stages: Sequence[Mapping[str, Any]] = ()
    full_document: str | None = None
    full_document_before_change: str | None = None
    max_await_ms: int = 500
    show_expanded_events: bool = True


@dataclass(frozen=True)
class Start:
    """Where a stream begins: after a token, at a cluster time (inclusive), or now."""

    token: str | None = None
    at: Timestamp | None = None


class Batch(NamedTuple):
    """One reply: raw events in stream order, and the token up to which they are whole: never one inside a split event."""

    events: list[bytes]
    token: str
    bytes: int


LONGEST_AWAIT_MS = 1_000
"""A longer `cursor.max.await.time.ms` is waited in pieces of this length, so that a stop does not wait for it."""

_VERSION = slice(18, 22)
"""Where a token says in which version of their format it is written."""

CAREFUL_BYTES = 64 * 1024 * 1024
"""So much is read one event at a time behind a failure at an event: more than one answer of the server holds."""


def _stream_error(error: driver.PyMongoError) -> BaseException:
    """What ends a change stream: an error of ours, also where the server failed at an event, or at a stage."""
    found = translated(error, "reading the change stream")
    if found is not error or not isinstance(error, driver.OperationFailure):
        return found
    name = (error.details or {}).get("codeName", "")
    return errors.SourceUnsuitable(
        f"reading the change stream: the server fails at an event (error {error.code} {name}); what came before it is "
        "captured. If source.cursor.pipeline is set, see whether one of its stages fails for some documents; "
        "otherwise look into the server's log"
    )


@dataclass
class ChangeStream:
    """A change stream that is read batch by batch and goes on after elections and lost connections by itself.

    Behind an event it is opened at the event's cluster time, and what comes again is dropped: `resume_token.resumes_alone`
    says why. Where the event itself does not come again, its position is lost.

    `retries` bounds the attempts in a row, -1 for any number; `attempts` are those since the server last answered.
    `begins` is the token that the server gave when it was first opened: everything that it reads comes after it.
    """

    connection: pymongo.MongoClient[Any]
    options: StreamOptions
    start: Start
    retries: int = -1
    initial_delay: float = 0.3
    max_delay: float = 10.0
    stopped: threading.Event = field(default_factory=threading.Event)
    reconnects: int = 0
    resolved: Callable[[], StreamOptions] | None = None
    """What to open behind an invalidate: a database may be made anew in another spelling."""

    def __post_init__(self) -> None:
        self.token: str | None = self.start.token
        self.begins: str | None = None
        self._behind: str | None = None
        self._has_met = False
        self._probed: Batch | None = None
        self._careful = 0
        self._session: Any = None
        self._cursor = 0
        self._pinned: pymongo.MongoClient[Any] | None = None
        self._election: Any = None
        self.elections = 0
        self.attempts = 0

    @property
    def is_open(self) -> bool:
        """Whether a cursor is open on the server, as far as is known."""
        return self._cursor != 0

    def open(self) -> str | None:
        """Open the cursor; the token of its position (the server gives one from the first reply on)."""
        stage = self._stage()
        database = self._server()[self.options.db or "admin"]
        self._session = self._server().start_session()
        reply = database.command(
            {
                "aggregate": self.options.collection or 1,
                "pipeline": [{"$changeStream": stage}, *self.options.stages],
                "cursor": {"batchSize": 0},
            },
            session=self._session,
            read_preference=self._read_preference(),
        )
        self._cursor = reply["cursor"]["id"]
        token = reply["cursor"].get("postBatchResumeToken")
        if token:
            self.begins = self.begins or token["_data"]
            self._move_to(token["_data"])
        return self.token

    def _count_election(self) -> None:
        """Each election has an identifier, which the driver's monitor hears of: another one than before is counted."""
        election = self.connection.topology_description.max_election_id
        self.elections += int(None not in (self._election, election) and election != self._election)
        self._election = election or self._election

    def next(self) -> Batch:
        """The next batch, empty after `max_await_ms` without an event; reopened after a resumable error.

        Raises `HistoryLost`, or one of our errors when the retries are used up.
        """
        if self._probed is not None:
            probed, self._probed = self._probed, None
            return probed
        while True:
            try:
                if not self._cursor:
                    self.open()
                batch = self._more()
                self.attempts = 0
                return batch
            except driver.PyMongoError as error:
                self._forget_cursor()
                self.attempts += 1
                if is_resumable(error) and not self._is_last():
                    self.reconnects += 1
                    self.stopped.wait(self.delay())
                elif self._has_failed_at_an_event(error):
                    self._careful = CAREFUL_BYTES
                else:
                    raise _stream_error(error) from error

    def delay(self) -> float:
        """The seconds to wait after so many attempts: doubled with each, up to the longest wait."""
        return min(self.initial_delay * 2.0 ** min(self.attempts - 1, 60), self.max_delay)

    def probe(self) -> None:
        """Read a first batch without waiting for events: a position that is lost shows only then. `next` gives it."""
        try:
            self._probed = self._more(max_await_ms=1)
        except driver.OperationFailure as error:
            if not self._has_failed_at_an_event(error):
                raise
            self._forget_cursor()
            self._careful = CAREFUL_BYTES

    def _has_failed_at_an_event(self, error: BaseException) -> bool:
        """Whether events come before the one that the server failed at: they are read one by one until it fails again."""
        return _is_about_an_event(error) and not is_resumable(error) and not self._careful and self.token is not None

    def close(self) -> None:
        """Give the cursor back to the server, if it still listens."""
        cursor, session = self._cursor, self._session
        self._cursor, self._session = 0, None
        try:
            if cursor:
                self._server()[self.options.db or "admin"].command(
                    {"killCursors": self.options.collection or "$cmd.aggregate", "cursors": [Int64(cursor)]},
                    session=session,
                )
            if session:
                session.end_session()
        except driver.PyMongoError:
            pass
        if self._pinned is not None:
            self._pinned.close()
            self._pinned = None

    def _is_last(self) -> bool:
        return self.stopped.is_set() or 0 <= self.retries < self.attempts

    def _forget_cursor(self) -> None:
        if self._session is not None:
            try:
                self._session.end_session()
            except driver.PyMongoError:
                pass
        self._cursor, self._session = 0, None
        if self._pinned is not None:
            self._pinned.close()
            self._pinned = None

    def _more(self, *, max_await_ms: int | None = None) -> Batch:
        reply = self._server()[self.options.db or "admin"].command(
            {
                "getMore": Int64(self._cursor),
                "collection": self.options.collection or "$cmd.aggregate",
                "maxTimeMS": max_await_ms or min(self.options.max_await_ms, LONGEST_AWAIT_MS),
                **({"batchSize": 1} if self._careful else {}),
            },
            session=self._session,
            codec_options=DEFAULT_RAW_BSON_OPTIONS,
            read_preference=self._read_preference(),
        )
        raw = bytes(reply.raw)
        events, rest = split_batch(raw, b"nextBatch")
        self._cursor = rest["id"]
        self._careful = max(0, self._careful - len(raw)) if events else 0
        self._count_election()
        token = rest.get("postBatchResumeToken")
        unseen = self._unseen(events)
        if events and split_events.is_unfinished(events[-1]):
            whole = [event for event in events if not split_events.is_unfinished(event)]
            self._move_to(_token(whole[-1]) if whole else self.token or "")
        else:
            self._move_to(token["_data"] if token else _token(events[-1]) if events else self.token or "")
        if not self._cursor and not events:
            raise driver.CursorNotFound("the server closed the change stream", CURSOR_NOT_FOUND)
        return Batch(unseen, self.token or "", len(raw))

    def _unseen(self, events: list[bytes]) -> list[bytes]:
        """The events without those up to the token that the stream was opened behind by its time."""
        if self._behind is None:
            return events
        for number, event in enumerate(events):
            token = _token(event)
            if self._is_past(token):
                self._pass()
                return events[number:]
            self._has_met = self._has_met or not self._is_past(token, backwards=True)
        return []

    def _move_to(self, token: str) -> None:
        if self._behind is None:
            self.token = token
        elif self._is_past(token):
            self._pass()
            self.token = token

    def _pass(self) -> None:
        """The event that the stream was opened behind must have come again, or the oplog is another one.

        A stage that looks at the looked-up document may hide an event that it let through before: then its time must be there.
        """
        assert self._behind is not None
        if not self._has_met and not self.holds(self._behind):
            raise HistoryLost(CHANGE_STREAM_FATAL)
        self._behind = None

    def holds(self, token: str) -> bool:
        """Whether the oplog has this event, for a stream of the same scope without further stages.

        A server of another version may write its token otherwise: then an event of its cluster time has to do.
        """
        at, event_token = resume_token.position(token), resume_token.without_fragment(token)
        target: Any = self._server() if self.options.db is None else self._server()[self.options.db]
        target = target if self.options.collection is None else target[self.options.collection]
        bare = target.watch(
            [{"$project": {"_id": 1}}],
            start_at_operation_time=Timestamp(at.seconds, at.increment),
            show_expanded_events=self.options.show_expanded_events or None,
            batch_size=1,
            max_await_time_ms=LONGEST_AWAIT_MS,
        )
        with bare as stream:
            while not self.stopped.is_set():
                event, mark = stream.try_next(), stream.resume_token
                found = event["_id"]["_data"] if event is not None else mark["_data"] if mark is not None else token
                if resume_token.position(found)[:2] > at[:2]:
                    return False
                is_other_format = found[_VERSION] != token[_VERSION]
                if event is not None and (is_other_format or resume_token.without_fragment(found) == event_token):
                    return True
        return True

    def _is_past(self, token: str, *, backwards: bool = False) -> bool:
        assert self._behind is not None
        this, behind = resume_token.without_fragment(token), resume_token.without_fragment(self._behind)
        return this < behind if backwards else this > behind

    def _stage(self) -> dict[str, Any]:
        stage: dict[str, Any] = {}
        if self.options.db is None:
            stage["allChangesForCluster"] = True
        if self.options.full_document:
            stage["fullDocument"] = self.options.full_document
        if self.options.full_document_before_change:
            stage["fullDocumentBeforeChange"] = self.options.full_document_before_change
        if self.options.show_expanded_events:
            stage["showExpandedEvents"] = True
        self._behind, self._has_met = None, False
        if self.token and self._is_moved():
            position = resume_token.position(self.token)
            stage["startAtOperationTime"] = Timestamp(position.seconds, position.increment)
            self._behind, self._has_met = self.token, True
        elif self.token and resume_token.resumes_alone(self.token):
            stage["startAfter"] = {"_data": self.token}
        elif self.token:
            position = resume_token.position(self.token)
            stage["startAtOperationTime"] = Timestamp(position.seconds, position.increment)
            self._behind = self.token
        elif self.start.at is not None:
            stage["startAtOperationTime"] = self.start.at
        return stage

    def _is_moved(self) -> bool:
        """Whether the stream is to go on elsewhere: behind an invalidate, where it has been asked and the place is another."""
        if self.resolved is None or not resume_token.is_invalidate(self.token or ""):
            return False
        before, self.options = self.options, self.resolved()
        return (before.db, before.collection) != (self.options.db, self.options.collection)

    def _server(self) -> pymongo.MongoClient[Any]:
        """The client to read with. A cursor lives on one server: with several to choose from, one is pinned."""
        if self._pinned is not None:
            return self._pinned
        self._pinned = _pinned(self.connection, self.connection.read_preference)
        return self._pinned or self.connection

    def _read_preference(self) -> Any:
        return ReadPreference.PRIMARY_PREFERRED if self._pinned is not None else self.connection.read_preference


def _pinned(connection: pymongo.MongoClient[Any], preference: Any) -> pymongo.MongoClient[Any] | None:
    """A client of the one server on which a cursor is to live, to be closed; None where there is none to choose."""
    if preference == ReadPreference.PRIMARY and len(connection.nodes) < 2:
        return None
    hello = connection.admin.command("hello", read_preference=preference)
    if preference == ReadPreference.PRIMARY and hello.get("setName"):
        return None
    return _direct(connection, hello.get("me") or "{}:{}".format(*sorted(connection.nodes)[0]))


def _direct(connection: pymongo.MongoClient[Any], host: str) -> pymongo.MongoClient[Any]:
    """A client of one server with the other's options (credentials, TLS, timeouts), also those of its connection string."""
    given = dict(connection._init_kwargs)
    uri = given.pop("host", None)
    uri = uri[0] if isinstance(uri, (list, tuple)) and uri else uri
    options = {name: value for name, value in given.items() if name not in ("port", *_OF_A_SET)}
    known = connection.options
    if isinstance(uri, str) and uri.startswith("mongodb+srv://"):
        # What DNS says of them is known to the client: the address itself is no longer asked for.
        options.setdefault("tls", known.pool_options._ssl_context is not None)
    if known.pool_options._credentials is not None and known.pool_options._credentials.source:
        options.setdefault("authSource", known.pool_options._credentials.source)
    return pymongo.MongoClient(direct_uri(uri if isinstance(uri, str) else "", host), directConnection=True, **options)


_OF_A_SET = (
    "directConnection", "replicaSet", "readPreference", "readPreferenceTags", "maxStalenessSeconds", "loadBalanced",
    "srvMaxHosts", "srvServiceName", "localThresholdMS",
)  # fmt: skip


def direct_uri(uri: str, host: str) -> str:
    """A connection string's credentials and options with one server in the place of its hosts, and no set to choose from."""
    rest = uri.partition("://")[2]
    path = re.search(r"[/?]", rest)
    authority, options = (rest[: path.start()], rest[path.start() :]) if path else (rest, "")
    credentials = authority.rpartition("@")[0]
    database, _, query = options.lstrip("/").partition("?")
    left_out = {name.lower() for name in _OF_A_SET}
    kept = [part for part in query.split("&") if part and part.partition("=")[0].lower() not in left_out]
    return f"mongodb://{credentials and credentials + '@'}{host}/{database}{'?' if kept else ''}{'&'.join(kept)}"


def _token(event: bytes) -> str:
    """An event's token; its documents are not looked into, as not every one can be decoded."""
    return str(RawBSONDocument(event)["_id"]["_data"])


def split_batch(reply: bytes, name: bytes) -> tuple[list[bytes], dict[str, Any]]:
    """The raw documents of a cursor reply's batch, and the rest of its `cursor` document, decoded."""
    start, end = _element(reply, 4, len(reply), b"cursor")
    first, last = _element(reply, start + 4, end, name)
    documents: list[bytes] = []
    append, index = documents.append, reply.index
    at, stop = first + 4, last - 1
    while at < stop:
        at = index(b"\0", at + 1) + 1
        following = at + _int32(reply, at)[0]
        append(reply[at:following])
        at = following
    before = first - len(name) - 2
    rest = reply[start + 4 : before] + reply[last:end]
    return documents, decode((len(rest) + 4).to_bytes(4, "little") + rest, EXACT)


_FIXED = {0x01: 8, 0x07: 12, 0x08: 1, 0x09: 8, 0x0A: 0, 0x10: 4, 0x11: 8, 0x12: 8, 0x13: 16}


def _element(raw: bytes, at: int, end: int, name: bytes) -> tuple[int, int]:
    """Where the value of one field of a document begins and ends."""
    while at < end - 1:
        kind = raw[at]
        zero = raw.index(b"\0", at + 1)
        value = zero + 1
        if kind in (0x03, 0x04):
            after = value + _int32(raw, value)[0]
        elif kind == 0x02:
            after = value + 4 + _int32(raw, value)[0]
        elif kind == 0x05:
            after = value + 5 + _int32(raw, value)[0]
        else:
            after = value + _FIXED[kind]
        if raw[at + 1 : zero] == name:
            return value, after
        at = after
    raise KeyError(name.decode())


# --- snapshot reads ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Range:
    """A half-open range of `_id`, as BSON of ``{"lo": …}`` and ``{"hi": …}``: bytes travel to executors as they are."""

    lo: bytes | None = None
    hi: bytes | None = None

    def condition(self) -> dict[str, Any]:
        """The filter of `find`: `$expr` compares across all BSON types, where a plain range would lose rows."""
        bounds = []
        if self.lo is not None:
            bounds.append({"$gte": ["$_id", RawBSONDocument(_renamed(self.lo, b"$literal"))]})
        if self.hi is not None:
            bounds.append({"$lt": ["$_id", RawBSONDocument(_renamed(self.hi, b"$literal"))]})
        return {"$expr": {"$and": bounds}} if bounds else {}

    def ends(self) -> dict[str, Any]:
        """The same as options of `find` beside a hint: a clustered collection would be read whole for each `$expr`.

        An open end holds all there is, MinKey and MaxKey too; an ordinary index leaves out MaxKey there.
        """
        given = {"min": self.lo, "max": self.hi}
        return {name: RawBSONDocument(_renamed(end, b"_id")) for name, end in given.items() if end is not None}


def boundary(
    connection: pymongo.MongoClient[Any], collection: Collection, *, lo: bytes | None, documents: int
) -> bytes | None:
    """The `_id` that stands `documents` places after `lo` in index order, as BSON ``{"hi": _id}``; None past the end."""
    command = {
        "find": collection.name,
        **_within(collection, Range(lo=lo)),
        "projection": {"_id": 1},
        "sort": {"_id": 1},
        "hint": {"_id": 1},
        "skip": documents,
        "limit": 1,
        "singleBatch": True,
    }
    with _reading_whole(f"planning the snapshot of {collection.namespace}"):
        reply = connection[collection.db].command(
            command, codec_options=DEFAULT_RAW_BSON_OPTIONS, read_preference=connection.read_preference
        )
    found, _rest = split_batch(bytes(reply.raw), b"firstBatch")
    return id_as_hi(found[0]) if found else None


def _within(collection: Collection, bounds: Range, condition: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What restricts a `find` to a range, and to what a condition lets through."""
    ends = bounds.ends() if collection.is_clustered else {}
    conditions = [part for part in ({} if ends else bounds.condition(), dict(condition or {})) if part]
    return {"filter": {"$and": conditions} if len(conditions) > 1 else (conditions or [{}])[0], **ends}


def hi_as_lo(hi: bytes) -> bytes:
    """The end of one range as the beginning of the next."""
    return _renamed(hi, b"lo")


def id_as_hi(raw: bytes) -> bytes:
    """The `_id` of a raw document as the end of the range before it."""
    found = next(element for element in raw_bson.elements(raw) if element.name == b"_id")
    return _single(found.kind, b"hi", raw[found.start : found.end])


def _renamed(raw: bytes, name: bytes) -> bytes:
    """A document of one field under another name. The value stays bytes: not every `_id` can be decoded."""
    zero = raw.index(b"\0", 5)
    return _single(raw[4], name, raw[zero + 1 : -1])


def _single(kind: int, name: bytes, value: bytes) -> bytes:
    body = bytes((kind,)) + name + b"\0" + value + b"\0"
    return (len(body) + 4).to_bytes(4, "little") + body


class Chunk(NamedTuple):
    """One batch of a chunk: raw documents, and the cluster time at which the whole chunk is read."""

    documents: list[bytes]
    at: Timestamp


def read_chunk(
    connection: pymongo.MongoClient[Any],
    collection: Collection,
    bounds: Range,
    *,
    after: Timestamp,
    fetch_size: int = 0,
    condition: Mapping[str, Any] | None = None,
    is_exact: bool = False,
) -> Generator[Chunk, None, None]:
    """Drain the documents of a range, all at one cluster time that is known and at or after `after`; at that very one with
    `is_exact`.

    Raises `SnapshotExpired` (read it again, smaller), `CollectionChanged`, or one of our errors. Capped collections have
    no snapshot reads: there the time is the one from just before, and replaying the changes after it converges. They are
    read from the primary, whose time that is: another server may be behind it, and its documents older than they say.
    """
    asked = ReadPreference.PRIMARY if collection.is_capped else connection.read_preference
    reading = _reading(connection, asked)
    with _reading_whole(f"reading a chunk of {collection.namespace}"), reading as (server, session, preference):
        database = server[collection.db]
        at = operation_time(connection) if collection.is_capped else None
        reply = database.command(
            _find(collection, bounds, after=after, fetch_size=fetch_size, condition=condition, is_exact=is_exact),
            session=session,
            codec_options=DEFAULT_RAW_BSON_OPTIONS,
            read_preference=preference,
        )
        name = b"firstBatch"
        while True:
            documents, rest = split_batch(bytes(reply.raw), name)
            at = at or rest["atClusterTime"]
            yield Chunk(documents, at)
            if not rest["id"]:
                return
            name = b"nextBatch"
            reply = database.command(
                {"getMore": Int64(rest["id"]), "collection": collection.name}
                | ({"batchSize": fetch_size} if fetch_size else {}),
                session=session,
                codec_options=DEFAULT_RAW_BSON_OPTIONS,
                read_preference=preference,
            )


@contextmanager
def _reading_whole(what: str) -> Iterator[None]:
    """As `translating`; an error that has no other meaning than that this read is refused leaves as `ReadRefused`."""
    try:
        with translating(what):
            yield
    except driver.OperationFailure as error:
        raise ReadRefused(f"the server refuses to read it ({code_of(error)})") from error


def code_of(error: driver.OperationFailure) -> str:
    """A server's error as its code and the code's name, without its text, which may quote documents."""
    name = (error.details or {}).get("codeName")
    return f"error {error.code}{f', {name}' if name and not str(name).startswith('Location') else ''}"


@contextmanager
def _reading(connection: pymongo.MongoClient[Any], asked: Any) -> Iterator[tuple[pymongo.MongoClient[Any], Any, Any]]:
    """The server that a chunk is read from, a session on it, and the read preference for it, where `asked` is the user's.

    A chunk whose cursor is gone (an election, a collection that was dropped) is to be read again.
    """
    pinned = _pinned(connection, asked)
    server = pinned or connection
    try:
        with server.start_session() as session:
            is_any = pinned is not None and asked != ReadPreference.PRIMARY
            yield server, session, ReadPreference.PRIMARY_PREFERRED if is_any else asked
    except driver.OperationFailure as error:
        if error.code in KILLED:
            raise SnapshotExpired from error
        raise
    finally:
        if pinned is not None:
            pinned.close()


def _find(
    collection: Collection,
    bounds: Range,
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
    }
    if collection.uuid is not None:
        command["collectionUUID"] = collection.uuid
    command["sort"] = command["hint"] = {"_id": 1}
    if not collection.is_capped:
        command["readConcern"] = {"level": "snapshot", "atClusterTime" if is_exact else "afterClusterTime": after}
    return command


def sampled_ids(connection: pymongo.MongoClient[Any], collection: Collection, *, documents: int) -> list[bytes]:
    """So many documents of a collection, by chance: raw, with nothing but their `_id`."""
    stages = [{"$sample": {"size": documents}}, {"$project": {"_id": 1}}]
    with translating(f"choosing documents of {collection.namespace}"):
        found = connection[collection.db][collection.name].with_options(DEFAULT_RAW_BSON_OPTIONS).aggregate(stages)
        return list({bytes(each.raw) for each in found})


CATCH_UP_SECONDS = 60.0
"""A quiet server moves its change streams every ten seconds."""


class NamespaceGone(Exception):
    """The collection was dropped or renamed in the time that is asked for."""


def changed_keys(
    connection: pymongo.MongoClient[Any], db: str, name: str, *, behind: str, until: Timestamp, limit: int
) -> list[bytes]:
    """The document keys, raw, of a collection's changes behind a token and up to a cluster time; at most about `limit`.

    Raises `HistoryLost`, or `NamespaceGone`.
    """
    at = resume_token.position(behind)
    last = resume_token.without_fragment(behind)
    stages: list[Mapping[str, Any]] = [
        {"$match": {"$or": [{"ns.coll": name}, {"operationType": {"$in": ["dropDatabase", "invalidate"]}}]}},
        {"$project": {"operationType": 1, "documentKey": 1, "clusterTime": 1}},
    ]
    options = StreamOptions(db=db, stages=stages, max_await_ms=200, show_expanded_events=False)
    deadline = time.monotonic() + CATCH_UP_SECONDS
    stream = ChangeStream(connection, options, Start(at=Timestamp(at.seconds, at.increment)), retries=3)
    found: list[bytes] = []
    try:
        is_settled = False
        while not is_settled and len(found) < limit:
            batch = stream.next()
            if not batch.events and time.monotonic() > deadline:
                raise errors.SourceUnreachable(f"{db}.{name}: the change stream does not reach the time of the read")
            for event in map(RawBSONDocument, batch.events):
                if resume_token.without_fragment(event["_id"]["_data"]) <= last or event["clusterTime"] > until:
                    continue
                if "documentKey" not in event:
                    raise NamespaceGone
                found.append(bytes(event["documentKey"].raw))
            reached = resume_token.position(batch.token)
            # At the very time there may be more of it, as long as events come.
            is_past = (reached.seconds, reached.increment) > (until.time, until.inc)
            is_settled = is_past or ((reached.seconds, reached.increment) == (until.time, until.inc) and not batch.events)
    finally:
        stream.close()
    return found


def refusal_of_filter(connection: pymongo.MongoClient[Any], namespace: str, condition: Mapping[str, Any]) -> str | None:
    """Why the server does not take a filter over `database.collection`; None where it does. Nothing is read."""
    db, _, name = namespace.partition(".")
    find = {"find": name, "filter": dict(condition)}
    try:
        with translating("trying a filter"):
            connection[db].command({"explain": find, "verbosity": "queryPlanner"}, codec_options=LENIENT)
    except driver.OperationFailure as error:
        return _first_line(error)
    return None


def wait_until(connection: pymongo.MongoClient[Any], predicate: Any, *, seconds: float) -> bool:
    """Ask again until `predicate(connection)` holds, at most so long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if predicate(connection):
            return True
        time.sleep(0.05)
    return False


def _refused_at_handshake(error: driver.ServerSelectionTimeoutError) -> bool:
    details = getattr(error, "details", None)
    return bool(isinstance(details, Mapping) and details.get("code") == AUTHENTICATION_FAILED)


def _refused_command(error: BaseException) -> str:
    """The command that was refused and its database, by their names: the rest of the text holds filters and documents."""
    found = re.match(r"not authorized on (\S+) to execute command \{ (\w+):", str(error))
    return f": not authorized on {found[1]} to execute command {found[2]}" if found else ""


def _first_line(error: BaseException) -> str:
    said = re.sub(r" \(configured timeouts: [^)]*\)", "", _safe(error).splitlines()[0])
    return re.split(r", full error: |, Timeout: |, Topology Description: ", said)[0][:300]


def _safe(error: BaseException) -> str:
    """The error's text without a user name or password of a connection string."""
    return re.sub(r"//[^/@\s]+@", "//***@", str(error))
