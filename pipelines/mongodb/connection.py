"""The source as the settings describe it: a connection that can travel to executors, and the collections to capture."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cdc_core import errors
from cdc_core.bronze import event_rows as events
from cdc_core.properties.source import CaptureScope, OversizeMode
from cdc_core.stream import filters
from pipelines.mongodb import catalog, change_stream
from pipelines.mongodb import client as mongodb
from pipelines.mongodb import server as mongodb_server
from pipelines.settings import secrets

if TYPE_CHECKING:
    from cdc_core.properties.source import Source

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Connection:
    """Where to connect, with every secret resolved: it lives in memory only, and shows nothing when it is printed."""

    uri: str = field(repr=False)
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def client(self, **more: Any) -> mongodb.Client:
        """A client of its own; close it."""
        return mongodb.client(self.uri, **{**self.options, **more})

    def __reduce__(self) -> tuple[Any, ...]:
        return Connection, (self.uri, dict(self.options))


def connection(source: Source) -> Connection:
    """The connection that the settings describe; what the connection string says wins over the properties.

    Raises `SettingsError` where a secret cannot be resolved.
    """
    uri = secrets.resolve(source.mongodb_connection_string)
    given = _given(uri)
    options: dict[str, Any] = {
        "connectTimeoutMS": source.mongodb_connect_timeout_ms or None,
        "serverSelectionTimeoutMS": source.mongodb_server_selection_timeout_ms,
        "socketTimeoutMS": source.mongodb_socket_timeout_ms or None,
        "heartbeatFrequencyMS": source.mongodb_heartbeat_frequency_ms,
    }
    # User and password belong together: those of the settings do not fill up what the connection string has.
    has_credentials = "@" in uri.partition("://")[2].partition("/")[0]
    if not has_credentials:
        options |= _credentials(source)
    if source.mongodb_ssl_enabled or given & {"tls", "ssl"}:
        options |= _tls(source, is_given=bool(given & {"tls", "ssl"}))
    return Connection(
        uri, {name: value for name, value in options.items() if value is not None and name.lower() not in given}
    )


def _given(uri: str) -> set[str]:
    """The names of the connection string's options, in lower case."""
    return {part.partition("=")[0].lower() for part in re.split("[&;]", uri.partition("?")[2]) if part}


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
    """What the change stream is opened with."""
    scope = stream_scope(source, client)
    return change_stream.StreamOptions(
        db=scope.db,
        collection=scope.collection,
        stages=[*filters.pipeline(source), *_skipping(source)],
        full_document=filters.full_document(source),
        full_document_before_change=filters.full_document_before_change(source),
        max_await_ms=source.cursor_max_await_time_ms or 1000,
    )


def stream_scope(source: Source, client: mongodb.Client) -> filters.Scope:
    """How wide the change stream is; the whole deployment where the one database that is captured does not exist yet.

    Lists ignore case and streams do not: the spelling of a database that is not there yet is unknown. A user who may
    read that one database alone gets a stream of the name as the settings have it, for the right is bound to its
    spelling too.
    """
    names = catalog.database_names(client)
    scope = filters.stream_scope(source, databases=names)
    is_found = source.capture_scope is not None or scope.db is None or scope.db in names
    return scope if is_found or not mongodb_server.may_watch_deployment(client) else filters.Scope(CaptureScope.DEPLOYMENT)


SKIPPED = events.SKIPPED
EVENT_BYTES = 16 * 1024 * 1024 - 64 * 1024
"""What the documents of one event may have together: the server sends no larger one, whatever the settings allow."""

TOKEN_FACTOR = 4
"""So often an event has the document's key about: by itself, in its token (as hexadecimal digits), in a transaction's
copy."""


def _skipping(source: Source) -> list[dict[str, Any]]:
    """`cursor.oversize.handling.mode=skip`: the server takes the documents out of an event that is too large.

    What is left of it still comes, so that it is counted and reported, where the connector's filter loses it in silence.
    """
    if source.cursor_oversize_handling_mode is not OversizeMode.SKIP:
        return []

    def size(field: str) -> dict[str, Any]:
        return {"$cond": [{"$eq": [{"$type": f"${field}"}, "object"]}, {"$bsonSize": f"${field}"}, 0]}

    documents = [size("fullDocument"), size("fullDocumentBeforeChange")]
    key = {"$multiply": [TOKEN_FACTOR, size("documentKey")]}
    whole = {"$add": [*documents, size("updateDescription"), key]}
    kept = ("_id", "operationType", "clusterTime", "wallTime", "ns", "documentKey", "lsid", "txnNumber")
    rest = {name: f"${name}" for name in kept}
    largest = {"$max": documents}
    is_large = {"$or": [{"$gt": [largest, source.cursor_oversize_skip_threshold]}, {"$gt": [whole, EVENT_BYTES]}]}
    said = {**rest, SKIPPED: {"$max": [largest, {"$cond": [{"$gt": [whole, EVENT_BYTES]}, whole, 0]}]}}
    return [{"$replaceWith": {"$cond": [is_large, said, "$$ROOT"]}}]


def check_oversize(source: Source, info: mongodb_server.ServerInfo) -> None:
    """Raise `SourceUnsuitable` where the server cannot split events."""
    if source.cursor_oversize_handling_mode is OversizeMode.SPLIT and info.version < (6, 0, 9):
        raise errors.SourceUnsuitable(
            f"source.cursor.oversize.handling.mode: split needs MongoDB 6.0.9 or later, but the server is {info.text}; "
            "use skip, or upgrade the server"
        )


def captured_databases(source: Source, names: Collection[str]) -> list[str]:
    """Those of the databases of which something may be captured: no right is needed on the others."""
    chosen, scope = filters.of(source), filters.stream_scope(source, databases=list(names))
    return [name for name in names if chosen.includes_database(name) and scope.db in (None, name)]


def captured(source: Source, client: mongodb.Client, *, is_begun: bool = False) -> list[catalog.SourceCollection]:
    """The collections that the settings capture and that exist now, in order of their names.

    Raises `SourceUnsuitable` for a view or a time-series collection that the settings name: they have no change stream.
    Where a capture `is_begun` one of them may have taken a collection's name: the others go on, and it is warned of.
    """
    chosen = filters.of(source)
    found = [
        collection
        for collection in catalog.collections(client, captured_databases(source, catalog.database_names(client)))
        if chosen.includes(collection.db, collection.name)
    ]
    # A pattern may match a view by chance; a view that is named was meant, and would wait for events for ever.
    named = {(db.lower(), name.lower()) for db, name in chosen.named()}
    for collection in found:
        if collection.kind != "collection" and (collection.db.lower(), collection.name.lower()) in named:
            kind = "time-series collection" if collection.kind == "timeseries" else collection.kind
            message = f"{collection.namespace} is a {kind}, which has no change stream; remove it from the include list"
            if not is_begun:
                raise errors.SourceUnsuitable(message)
            _warn_once(message)
    return [collection for collection in found if collection.kind == "collection"]


@functools.lru_cache(maxsize=1000)
def _warn_once(message: str) -> None:
    log.warning("%s", message)


@functools.lru_cache(maxsize=4)
def _worker_client(uri: str, options: tuple[tuple[str, Any], ...]) -> mongodb.Client:
    return mongodb.client(uri, is_known=True, **dict(options))


def worker_client(connection: Connection) -> mongodb.Client:
    """The one client of an executor's process for this connection, kept from chunk to chunk."""
    return _worker_client(connection.uri, tuple(sorted(connection.options.items())))
