"""The source as the settings describe it: a connection that can be sent to executors, the stream's options, the collections."""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from cdc_core import errors
from cdc_core.bronze import event_rows as events
from cdc_core.properties import types as values
from cdc_core.properties.source import BY_NAME, CaptureScope, OversizeMode, Source
from cdc_core.stream import filters
from pipelines.mongodb import catalog, change_stream
from pipelines.mongodb import client as mongodb
from pipelines.mongodb import server as mongodb_server
from pipelines.settings import secrets

log = logging.getLogger(__name__)


LEAST_HEARTBEAT_MS = 500
"""The driver takes no lower `heartbeatFrequencyMS`; the connector's takes any."""

LONGEST_MS = 10**9 - 1
"""The driver takes no longer times, which are eleven days; the connector's takes Java's longest, which many give for no limit."""


@dataclass(frozen=True)
class Connection:
    """A connection string and client options, with secrets resolved: kept in memory only, and hidden from `repr`."""

    uri: str = field(repr=False)
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def client(self, **more: Any) -> mongodb.Client:
        """A new client, to be closed by the caller."""
        return mongodb.client(self.uri, **{**self.options, **more})


def connection(source: Source) -> Connection:
    """The connection that the settings describe; options of the connection string override the properties.

    Raises `SettingsError` where a secret cannot be resolved.
    """
    uri = secrets.resolve(source.mongodb_connection_string)
    uri_options = {name.lower(): value for name, value in mongodb.uri_options(uri).items()}
    options: dict[str, Any] = {
        "connectTimeoutMS": min(source.mongodb_connect_timeout_ms, LONGEST_MS),
        "serverSelectionTimeoutMS": min(source.mongodb_server_selection_timeout_ms, LONGEST_MS),
        "socketTimeoutMS": min(source.mongodb_socket_timeout_ms, LONGEST_MS),
        "heartbeatFrequencyMS": min(max(source.mongodb_heartbeat_frequency_ms, LEAST_HEARTBEAT_MS), LONGEST_MS),
    }
    # User and password belong together: the settings do not complete the connection string's.
    if not values.login(uri.partition("://")[2]):
        options |= _credentials(source)
        # Users of these mechanisms are in no database: the driver knows it, unless the settings name one.
        if uri_options.get("authmechanism") in _OUTSIDE and options.get("authSource") == _AUTH_SOURCE:
            del options["authSource"]
    if uses_tls(source, uri):
        options |= _tls(source, is_given=bool(uri_options.keys() & _OF_TLS))
    return Connection(uri, {name: value for name, value in options.items() if name.lower() not in uri_options})


def uses_tls(source: Source, uri: str) -> bool:
    """Whether connections use TLS; the driver uses it for every mongodb+srv:// that does not say otherwise."""
    is_given = any(name.lower() in _OF_TLS for name in mongodb.uri_options(uri))
    return source.mongodb_ssl_enabled or is_given or uri.startswith("mongodb+srv://")


_OUTSIDE = frozenset({"GSSAPI", "MONGODB-AWS", "MONGODB-OIDC", "MONGODB-X509", "PLAIN"})
_AUTH_SOURCE = BY_NAME["mongodb.authsource"].default
_OF_TLS = frozenset({"tls", "ssl"})
"""The options of a connection string that switch TLS on or off."""


def _credentials(source: Source) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if source.mongodb_user is not None:
        options["username"] = secrets.resolve(source.mongodb_user)
        options["authSource"] = source.mongodb_authsource
    if source.mongodb_password is not None:
        options["password"] = secrets.resolve(source.mongodb_password)
    return options


def _tls(source: Source, *, is_given: bool) -> dict[str, Any]:
    options: dict[str, Any] = {} if is_given else {"tls": True}
    if source.mongodb_ssl_invalid_hostname_allowed:
        options["tlsAllowInvalidHostnames"] = True
    if source.mongodb_ssl_ca_file is not None:
        options["tlsCAFile"] = source.mongodb_ssl_ca_file
    if source.mongodb_ssl_certificate_key_file is not None:
        options["tlsCertificateKeyFile"] = source.mongodb_ssl_certificate_key_file
    if source.mongodb_ssl_certificate_key_file_password is not None:
        options["tlsCertificateKeyFilePassword"] = secrets.resolve(source.mongodb_ssl_certificate_key_file_password)
    return options


def stream_options(source: Source, client: mongodb.Client) -> change_stream.StreamOptions:
    """The options of the change stream."""
    scope = stream_scope(source, client)
    return change_stream.StreamOptions(
        db=scope.db,
        collection=scope.collection,
        stages=[*filters.pipeline(source), *_skipping(source)],
        careful_stages=[*filters.pipeline(source, is_over_events=True), *_skipping(source)],
        full_document=filters.full_document(source),
        full_document_before_change=filters.full_document_before_change(source),
        max_await_ms=source.cursor_max_await_time_ms or 1000,
    )


def stream_scope(source: Source, client: mongodb.Client) -> filters.Scope:
    """The scope of the change stream; the whole deployment where the only captured database does not exist yet.

    Include lists ignore case and change streams do not, and the spelling of a missing database is unknown. A user who may read
    only that database gets a stream with the spelling of the settings: the privilege depends on the spelling as well.
    """
    names = catalog.database_names(client)
    scope = filters.stream_scope(source, databases=names)
    is_found = source.capture_scope is not None or scope.db is None or scope.db in names
    return scope if is_found or not mongodb_server.may_watch_deployment(client) else filters.Scope(CaptureScope.DEPLOYMENT)


SKIPPED = events.SKIPPED
EVENT_BYTES = 16 * 1024 * 1024 - 64 * 1024
"""The bytes that the documents of one event may have together: the server sends no larger event."""

TOKEN_FACTOR = 4
"""How often an event contains the document's key: as `documentKey`, in its token (twice, as hexadecimal digits), in a copy of a
transaction's."""


def _skipping(source: Source) -> list[dict[str, Any]]:
    """The stages of `cursor.oversize.handling.mode=skip`: the server removes the documents of an event that is too large.

    The rest of the event still comes, so that it is counted and reported; Debezium's filter drops it silently.
    """
    if source.cursor_oversize_handling_mode is not OversizeMode.SKIP:
        return []

    def size(field: str) -> dict[str, Any]:
        return {"$cond": [{"$eq": [{"$type": f"${field}"}, "object"]}, {"$bsonSize": f"${field}"}, 0]}

    document_sizes = [size("fullDocument"), size("fullDocumentBeforeChange")]
    key_size = {"$multiply": [TOKEN_FACTOR, size("documentKey")]}
    event_size = {"$add": [*document_sizes, size("updateDescription"), key_size]}
    names = ("_id", "operationType", "clusterTime", "wallTime", "ns", "documentKey", "lsid", "txnNumber")
    fields = {name: f"${name}" for name in names}
    largest = {"$max": document_sizes}
    is_large = {"$or": [{"$gt": [largest, source.cursor_oversize_skip_threshold]}, {"$gt": [event_size, EVENT_BYTES]}]}
    short_event = {**fields, SKIPPED: {"$max": [largest, {"$cond": [{"$gt": [event_size, EVENT_BYTES]}, event_size, 0]}]}}
    return [{"$replaceWith": {"$cond": [is_large, short_event, "$$ROOT"]}}]


def check_oversize(source: Source, info: mongodb_server.ServerInfo) -> None:
    """Raise `SourceUnsuitable` where the settings need split events and the server cannot split them."""
    if source.cursor_oversize_handling_mode is OversizeMode.SPLIT and info.version < (6, 0, 9):
        raise errors.SourceUnsuitable(
            f"source.cursor.oversize.handling.mode: split needs MongoDB 6.0.9 or later, but the server is {info.text}; "
            "use skip, or upgrade the server"
        )


def captured_databases(source: Source, names: Collection[str]) -> list[str]:
    """The databases of which something may be captured; the user needs no privileges on the others."""
    source_filter, scope = filters.of(source), filters.stream_scope(source, databases=list(names))
    return [name for name in names if source_filter.includes_database(name) and scope.db in (None, name)]


def captured(source: Source, client: mongodb.Client, *, is_begun: bool = False) -> list[catalog.SourceCollection]:
    """The captured collections that exist now, in order of their names.

    Raises `SourceUnsuitable` for a view or a time-series collection that the settings name: they have no change stream. Once a
    capture `is_begun`, one of them may have replaced a collection: then it is logged, and the others are captured.
    """
    source_filter = filters.of(source)
    collections = [
        collection
        for collection in catalog.collections(client, captured_databases(source, catalog.database_names(client)))
        if source_filter.includes(collection.db, collection.name)
    ]
    # A pattern may match a view by chance; a view that is named would wait for events for ever.
    exact_names = {(db.lower(), name.lower()) for db, name in source_filter.named()}
    for collection in collections:
        if collection.kind != "collection" and (collection.db.lower(), collection.name.lower()) in exact_names:
            kind = "time-series collection" if collection.kind == "timeseries" else collection.kind
            message = f"{collection.namespace} is a {kind}, which has no change stream; remove it from the include list"
            if not is_begun:
                raise errors.SourceUnsuitable(message)
            _warn_once(message)
    return [collection for collection in collections if collection.kind == "collection"]


@functools.lru_cache(maxsize=1000)
def _warn_once(message: str) -> None:
    log.warning("%s", message)


@functools.lru_cache(maxsize=4)
def _worker_client(uri: str, options: tuple[tuple[str, Any], ...]) -> mongodb.Client:
    return mongodb.client(uri, is_known=True, **dict(options))


def worker_client(connection: Connection) -> mongodb.Client:
    """The client of an executor's process for this connection, cached across chunks."""
    return _worker_client(connection.uri, tuple(sorted(connection.options.items())))
