"""Checks that everything is there that a pipeline needs, and says what to fix. Changes nothing."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import SparkSession

from cdc_core import errors
from cdc_core.extended_json import query
from cdc_core.properties.source import FullUpdateType, LimitAction, SignalChannel, Source
from cdc_core.settings.parse import Settings
from cdc_core.snapshot import mode as snapshot_mode
from cdc_core.stream import fields as field_filters
from cdc_core.stream import filters
from cdc_core.tables import layout as tables
from pipelines import signs
from pipelines.capture import custom_mode, deployment, stream_opener, tokens
from pipelines.channels import kafka
from pipelines.delta import local_log, store_exclusion
from pipelines.delta import tables as delta
from pipelines.gold import expectations, models
from pipelines.mongodb import catalog, change_stream, snapshot_read
from pipelines.mongodb import client as mongodb
from pipelines.mongodb import connection as connections
from pipelines.mongodb import failures as mongodb_failures
from pipelines.mongodb import server as mongodb_server
from pipelines.operations import units
from pipelines.operations.findings import CheckVerdict, Finding, wrong
from pipelines.spark import failures as spark_failures
from pipelines.spark import session as sparks


@dataclass(frozen=True)
class CheckedSource:
    """The input of the questions: the settings, and their server."""

    settings: Settings
    client: mongodb.Client
    databases: Sequence[str]
    """The databases that this user sees."""
    collections: Sequence[catalog.SourceCollection]
    refused: Mapping[str, errors.AccessRefused]
    """The databases whose collections this user may not list, with the error."""
    existing: stream_opener.ExistingBronze = stream_opener.ExistingBronze()


Question = Callable[[CheckedSource], Iterator[Finding]]


def run(settings: Settings, session: Callable[[], SparkSession] | None = None) -> tuple[Finding, ...]:
    """All findings, in the order of a run; an unusable server is the last one.

    `session` starts Spark, which only a store or a catalog needs. Raises `SettingsError` if a secret cannot be resolved, or the
    class of a custom snapshot mode cannot be instantiated.
    """
    custom_mode.snapshotter(settings.source)
    findings = [*_settings(settings), *_gold(settings), *_lakehouse(settings, session)]
    findings.extend([*_signal_file(settings.source), *_kafka(settings)])
    connection = connections.connection(settings.source)
    findings.extend(_connection_string(connection.uri))
    findings.extend(_tls(settings.source, connection.uri))
    client = connection.client()
    try:
        findings.append(_server(client))
        if findings[-1].error is None:
            checked = CheckedSource(settings, client, *_listed(settings, client), _existing(settings, session))
            findings.extend(finding for question in QUESTIONS for finding in question(checked))
    finally:
        client.close()
    return tuple(findings)


def refuse(findings: Sequence[Finding]) -> None:
    """Raise the class of the most serious error, naming all findings with errors; does nothing without any."""
    problems = [(finding.about, finding.error) for finding in findings if finding.error is not None]
    if problems:
        error_class = type(errors.worst([error for _, error in problems]))
        number = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise error_class(f"{number} to fix before this pipeline can run: {', '.join(about for about, _ in problems)}")


def _settings(settings: Settings) -> Iterator[Finding]:
    yield Finding("settings", CheckVerdict.FINE, f"pipeline {settings.name}, {settings.source.capture_mode.value}")
    for warning in settings.warnings:
        yield Finding("settings", CheckVerdict.WARNING, warning)


def _gold(settings: Settings) -> Iterator[Finding]:
    """Read the files of models and suites as a service does at its start, which it ends for a mistake in them."""
    for about, read in (("models", _models), ("expectations", _suites)):
        try:
            if summary := read(settings):
                yield Finding(about, CheckVerdict.FINE, summary)
        except errors.SettingsError as error:
            for problem in error.problems:
                yield wrong(about, errors.SettingsError(problem))


def _models(settings: Settings) -> str:
    if settings.gold.models is None:
        return ""
    order = models.ordered(None, settings)
    if order.problems:
        raise errors.SettingsError(order.problems)
    return f"{len(order.models)} in {settings.gold.models}; medallion models check also analyses their queries"


def _suites(settings: Settings) -> str:
    count = len(expectations.read(settings))
    return "" if settings.gold.expectations is None else f"suites in {settings.gold.expectations}: {count}"


def _lakehouse(settings: Settings, session: Callable[[], SparkSession] | None) -> Iterator[Finding]:
    layout = delta.layout(settings.lakehouse)
    bronze = layout.bronze(settings.name)
    if layout.root is not None and local_log.folder(bronze) is not None:
        # Only the table's log is read, for which no Spark is started.
        lazily = None if session is None else functools.partial(sparks.lazily, session)
        yield _folder(layout.root) or _bronze(bronze, lazily, place=layout.root)
        return
    store = None if bronze.path is None or session is None else _store(bronze.path, session)
    is_away = store is not None and store.error is not None
    yield _bronze(bronze, None if is_away else session, place=bronze.label)
    if store is not None:
        yield store


def _existing(settings: Settings, session: Callable[[], SparkSession] | None) -> stream_opener.ExistingBronze:
    """What a capture reads of its bronze; nothing where `_lakehouse` reports that it cannot be read."""
    if session is not None:
        bronze, fingerprint = delta.layout(settings.lakehouse).bronze(settings.name), filters.fingerprint(settings.source)
        try:
            return stream_opener.ExistingBronze.read(sparks.lazily(session), bronze, fingerprint=fingerprint)
        except Exception as error:
            if spark_failures.translated(error) is None:
                raise
    return stream_opener.ExistingBronze()


def _folder(root: str) -> Finding | None:
    """What is wrong with a local root."""
    path = local_log.folder(tables.TableRef.at(root)) or Path()
    # Not by Path's methods, which raise where a folder cannot be looked into.
    folder = next(parent for parent in (path, *path.parents) if os.path.exists(parent))
    mend = "choose another lakehouse.root"
    if not os.path.isdir(folder):
        message = f"{folder} is not a folder"
        return Finding("lakehouse", CheckVerdict.WRONG, message, mend, errors.SettingsError(message))
    if not os.access(folder, os.W_OK | os.X_OK):
        mend = f"give this user write access, or {mend}"
        return Finding("lakehouse", CheckVerdict.WRONG, f"{folder} is not writable", mend, errors.DecisionNeeded())
    return None


def _bronze(bronze: tables.TableRef, session: Callable[[], SparkSession] | None, *, place: str) -> Finding:
    """Check that Spark has the catalog and that it outlives the session, and that an existing bronze table is ours."""
    try:
        if session is not None:
            delta.found(session(), bronze)
        return Finding("lakehouse", CheckVerdict.FINE, place)
    except Exception as error:
        if (failure := spark_failures.translated(error)) is None:
            raise
        return wrong("lakehouse", failure)


def _store(location: str, session: Callable[[], SparkSession]) -> Finding:
    """Check that the store can be written and listed, and lets only one of two drivers commit the same version."""
    try:
        return Finding("store", CheckVerdict.FINE, store_exclusion.prove(session(), location))
    except errors.MedallionError as error:
        return wrong("store", error)


def _signal_file(source: Source) -> Iterator[Finding]:
    """Find a file of signals that nobody can write or that the capture cannot empty: a missing file is no trouble for it."""
    file = Path(source.signal_file)
    if SignalChannel.FILE not in source.signal_enabled_channels:
        return
    is_closed = not os.access(file.parent, os.X_OK)
    if not os.path.isdir(file.parent):
        message = f"there is no folder {file.parent} for signal.file, or it cannot be looked into"
        mend = "create it; no shell replaces ~ or $NAME here, and a relative path begins at the capture's working directory"
        yield Finding("signals", CheckVerdict.WARNING, message, mend)
    elif is_closed or (os.path.exists(file) and not (os.path.isfile(file) and os.access(file, os.R_OK | os.W_OK))):
        message = f"signal.file is not a file that this user can read and write: {file}"
        yield Finding("signals", CheckVerdict.WARNING, message, "the capture removes the signals that it has handled")


def _kafka(settings: Settings) -> Iterator[Finding]:
    """Check the Kafka topics; problems are only warnings, because a capture runs without its Kafka channels."""
    for topic, trouble in kafka.troubles(settings).items():
        if trouble is None:
            yield Finding("kafka", CheckVerdict.FINE, f"the topic {topic} exists")
        else:
            mend = "create it with one partition; check signal.kafka.bootstrap.servers, signal.consumer.* and producer.override.*"
            yield Finding("kafka", CheckVerdict.WARNING, f"the topic {topic} cannot be used: {trouble}", mend)


def _connection_string(uri: str) -> Iterator[Finding]:
    if names := mongodb.left_out(uri):
        message = f"the connection string has options that are unknown or have an invalid value: {', '.join(names)}"
        yield Finding("server", CheckVerdict.WARNING, message, "check their spelling: the driver ignores them")


def _tls(source: Source, uri: str) -> Iterator[Finding]:
    """Find certificates that are for nothing: the connection is not encrypted."""
    files = {
        "mongodb.ssl.ca.file": source.mongodb_ssl_ca_file,
        "mongodb.ssl.certificate.key.file": source.mongodb_ssl_certificate_key_file,
    }
    names = [name for name, file in files.items() if file is not None]
    if names and not connections.uses_tls(source, uri):
        message = f"the connection is not encrypted, although there is {' and '.join(names)}"
        yield Finding("server", CheckVerdict.WARNING, message, "set source.mongodb.ssl.enabled: true")


def _server(client: mongodb.Client) -> Finding:
    try:
        info = mongodb_server.server_info(client)
        mongodb_server.check_suitable(info)
    except errors.MedallionError as error:
        return wrong("server", error)
    kind = "a sharded cluster" if info.is_sharded else "a replica set"
    return Finding("server", CheckVerdict.FINE, f"MongoDB {info.text}, {kind}")


def _listed(
    settings: Settings, client: mongodb.Client
) -> tuple[Sequence[str], Sequence[catalog.SourceCollection], Mapping[str, errors.AccessRefused]]:
    """The databases that can be seen, the collections of all that may be captured, and the databases whose collections cannot be listed.

    If databases cannot be listed, they are the ones that the include lists name.
    """
    visible_names = catalog.database_names(client)
    stream_db = filters.stream_scope(settings.source, databases=visible_names).db
    names = {*visible_names, *(db for db, _ in filters.of(settings.source).named()), *filter(None, [stream_db])}
    collections: list[catalog.SourceCollection] = []
    refusals: dict[str, errors.AccessRefused] = {}
    for db in sorted(connections.captured_databases(settings.source, names)):
        try:
            collections.extend(catalog.collections(client, [db]))
        except errors.AccessRefused as error:
            refusals[db] = error
    return visible_names, collections, refusals


def _captured(checked: CheckedSource) -> list[catalog.SourceCollection]:
    source_filter = filters.of(checked.settings.source)
    return [each for each in checked.collections if source_filter.includes(each.db, each.name)]


def _collections(checked: CheckedSource) -> Iterator[Finding]:
    """Check that named collections exist, and that captured ones have a change stream: views and time-series collections do not."""
    source = checked.settings.source
    source_filter = filters.of(source)
    included_names = set(source_filter.named())
    setting_names = (*checked.settings.silver.collections, *source.snapshot_collection_filter_overrides)
    all_names = included_names | {(db, name) for db, _, name in (each.partition(".") for each in setting_names)}
    collections = _captured(checked)
    for collection in collections:
        if collection.kind != "collection":
            yield _unwatchable(collection, is_named=(collection.db, collection.name) in included_names)
    source_names = {(each.db, each.name) for each in checked.collections}
    for db, error in checked.refused.items():
        yield wrong(f"collections of {db}", error, _grant(checked.client, db))
    captured_names = {(db, name) for db, name in all_names if source_filter.includes(db, name)}
    for db, name in sorted(all_names - captured_names):
        yield _left_out(f"{db}.{name}", is_named=(db, name) in included_names)
    for db, name in sorted((db, name) for db, name in captured_names - source_names if db not in checked.refused):
        mend = "names are case-sensitive in MongoDB; a collection that is created later is captured from then on"
        yield Finding("collections", CheckVerdict.WARNING, f"{db}.{name} does not exist", mend)
    stream_names = [each.namespace for each in collections if each.kind == "collection"]
    if stream_names:
        yield Finding("collections", CheckVerdict.FINE, f"{len(stream_names)} to capture: {signs.some(stream_names, 8)}")
        yield from _guardrail(source, len(stream_names))
        yield from _unread(source, stream_names)
        yield from _without_fields(source, collections)
    elif not checked.refused:
        mend = "check source.collection.include.list and database.include.list: they contain regular expressions"
        databases = (
            f"the server has the databases {signs.some(checked.databases, 8)}"
            if checked.databases
            else "this user sees no database"
        )
        yield Finding("collections", CheckVerdict.WARNING, f"no existing collection matches the lists; {databases}", mend)


def _guardrail(source: Source, captured: int) -> Iterator[Finding]:
    """Check `guardrail.collections.max`, over which a capture warns or ends."""
    if not deployment.is_over_limit(source, captured):
        return
    message = f"{captured} are captured, but guardrail.collections.max is {source.guardrail_collections_max}"
    if source.guardrail_collections_limit_action is LimitAction.FAIL:
        yield Finding("collections", CheckVerdict.WRONG, message, deployment.NARROW, errors.SourceUnsuitable())
    else:
        yield Finding("collections", CheckVerdict.WARNING, message, deployment.NARROW)


def _unread(source: Source, captured: Sequence[str]) -> Iterator[Finding]:
    """Find entries of `snapshot.include.collection.list` that match no captured collection."""
    entries = zip(source.snapshot_include_collection_list, filters.of(source).snapshots.include, strict=True)
    for text, entry in entries:
        if not any(map(entry.matches, captured)):
            message = f"{text} in source.snapshot.include.collection.list matches no captured collection"
            yield Finding(
                "snapshot", CheckVerdict.WARNING, message, "a snapshot only reads collections that match that list"
            )


def _without_fields(source: Source, captured: Sequence[catalog.SourceCollection]) -> Iterator[Finding]:
    """Find entries of `field.exclude.list` and `field.renames` that match no captured collection: their fields stay as they are."""
    entries = [
        *(("field.exclude.list", text, field_filters.read([text], [])) for text in source.field_exclude_list),
        *(("field.renames", text, field_filters.read([], [text])) for text in source.field_renames),
    ]
    for name, text, entry in entries:
        if not any(entry.of(each.db, each.name) for each in captured):
            message = f"{text} in source.{name} matches no captured collection, so it changes nothing"
            mend = "an entry is database.collection.field, with a backslash before each dot that is part of a name"
            yield Finding("fields", CheckVerdict.WARNING, message, mend)


def _left_out(namespace: str, *, is_named: bool) -> Finding:
    """A warning about a collection that the settings mention but do not capture."""
    does_nothing = "so its entries in silver.collections or snapshot.collection.filter.overrides have no effect"
    why = "although an include list names it" if is_named else does_nothing
    mend = "check the lists of source, and capture.scope"
    return Finding("collections", CheckVerdict.WARNING, f"{namespace} is not captured, {why}", mend)


def _unwatchable(collection: catalog.SourceCollection, *, is_named: bool) -> Finding:
    kind = "time-series collection" if collection.kind == "timeseries" else collection.kind
    message = f"{collection.namespace} is a {kind}, which has no change stream"
    if not is_named:
        return Finding("collections", CheckVerdict.WARNING, f"{message}: it is not captured")
    mend = "remove it from source.collection.include.list"
    return Finding("collections", CheckVerdict.WRONG, message, mend, errors.SourceUnsuitable())


def _names_meet(checked: CheckedSource) -> Iterator[Finding]:
    for message, mend in deployment.shared_places(checked.settings, _captured(checked)):
        yield Finding("names", CheckVerdict.WRONG, message, mend, errors.SourceUnsuitable())


def _stream(checked: CheckedSource) -> Iterator[Finding]:
    """Open the change stream as a capture does, and close it."""
    options = connections.stream_options(checked.settings.source, checked.client)
    stream = change_stream.ChangeStream(checked.client, options, change_stream.StreamStart())
    where = f"the database {options.db}" if options.db else "the whole deployment"
    if options.collection:
        where = f"the collection {options.db}.{options.collection}"
    try:
        with mongodb_failures.translating_opening():
            stream.open()
    except errors.AccessRefused as error:
        role = f"read on {options.db}" if options.db else "readAnyDatabase"
        yield wrong("change stream", error, _grant(checked.client, options.db, f": it needs {role}"))
    except errors.MedallionError as error:
        yield wrong("change stream", error)
    else:
        yield Finding("change stream", CheckVerdict.FINE, f"can be opened on {where}")
        yield from _position(checked, options)
    finally:
        stream.close()


def _position(checked: CheckedSource, options: change_stream.StreamOptions) -> Iterator[Finding]:
    """Open the change stream after bronze's position, as the next start does."""
    source, position = checked.settings.source, checked.existing.position
    if position is None:
        return
    custom, capture = (
        custom_mode.snapshotter(source),
        deployment.Deployment.of(source, connections.connection(source), checked.client),
    )
    try:
        replica_set = mongodb_server.server_info(checked.client).replica_set
        opener = stream_opener.StreamOpener.of(
            checked.existing, capture, options, threading.Event(), replica_set=replica_set
        )
        opener.open(position).stream.close()
    except errors.PositionLost as error:
        if not snapshot_mode.replaces_lost_position(source, custom=custom):
            yield wrong("position", error)
            return
        message = f"the oplog no longer holds the position of {tokens.utc(position.token)}"
        yield Finding(
            "position", CheckVerdict.WARNING, message, "nothing: the next start takes a new snapshot (snapshot.mode)"
        )
    except errors.MedallionError as error:
        yield wrong("position", error)
    else:
        yield Finding("position", CheckVerdict.FINE, f"the oplog holds bronze's, of {tokens.utc(position.token)}")


def _start(checked: CheckedSource) -> Iterator[Finding]:
    """Check `capture.start.op.time` as a first start does."""
    try:
        stream_opener.first_start(checked.settings.source, checked.client)
    except errors.SettingsError as error:
        yield wrong("start", error)


def _snapshot_reads(checked: CheckedSource) -> Iterator[Finding]:
    """Read one document of each collection as a snapshot does."""
    collections = [each for each in _captured(checked) if each.kind == "collection"]
    refusals = [(each, error) for each in collections if (error := _refusal(checked.client, each)) is not None]
    for collection, error in refusals:
        yield wrong(f"snapshot of {collection.namespace}", error, _grant(checked.client, collection.db))
    if collections and not refusals:
        yield Finding("snapshot reads", CheckVerdict.FINE, "allowed on every collection")


def _filters(checked: CheckedSource) -> Iterator[Finding]:
    """Check that the server accepts each filter of a snapshot: a refused one ends that collection's snapshot."""
    texts = checked.settings.source.snapshot_collection_filter_overrides
    for namespace in sorted(texts.keys() & {each.namespace for each in _captured(checked)}):
        # _snapshot_reads reports a missing privilege.
        with contextlib.suppress(errors.MedallionError):
            reason = snapshot_read.refusal_of_filter(checked.client, namespace, query.loads(texts[namespace]))
            if reason is not None:
                mend = f"fix source.snapshot.collection.filter.overrides.{namespace}"
                message = f"the server refuses its filter: {reason}"
                yield Finding(f"snapshot of {namespace}", CheckVerdict.WRONG, message, mend, errors.DecisionNeeded())


def _refusal(client: mongodb.Client, collection: catalog.SourceCollection) -> errors.MedallionError | None:
    after = mongodb_server.operation_time(client)
    try:
        with contextlib.closing(
            snapshot_read.read_chunk(client, collection, snapshot_read.IdRange(), after=after, fetch_size=1)
        ) as batches:
            next(batches, None)
    except errors.MedallionError as error:
        return error
    except mongodb_failures.ReadRefused as refusal:
        return errors.SourceUnsuitable(f"{collection.namespace}: {refusal}")
    except (
        mongodb_failures.SnapshotExpired,
        mongodb_failures.CollectionChanged,
    ):  # dropped or recreated just now: a snapshot handles that
        return None
    return None


def _oplog(checked: CheckedSource) -> Iterator[Finding]:
    window = mongodb_server.oplog_window(checked.client)
    if window is None:
        mend = "grant clusterMonitor to see it here and in status; behind a mongos, check each shard. The pipeline runs without it"
        yield Finding(
            "oplog", CheckVerdict.WARNING, "window unknown: this user may not read it, or the server is a mongos", mend
        )
        return
    seconds = window.last - window.first
    message = f"reaches back {units.duration(seconds)}"
    if seconds >= checked.settings.source.oplog_headroom_warning_hours * 3600:
        yield Finding("oplog", CheckVerdict.FINE, message)
        return
    mend = (
        "a capture that is down for longer loses its position: make the oplog larger "
        "(replSetResizeOplog with minRetentionHours), unless this server is new"
    )
    yield Finding("oplog", CheckVerdict.WARNING, message, mend)


def _images(checked: CheckedSource) -> Iterator[Finding]:
    """Check that each collection keeps the pre- or post-images that the capture mode needs; MongoDB keeps both or neither."""
    source = checked.settings.source
    images = ["pre-images"] * source.capture_mode.has_pre_images
    is_post_image = source.capture_mode_full_update_type is FullUpdateType.POST_IMAGE
    images += ["post-images"] * (source.capture_mode.has_full_updates and is_post_image)
    if not images:
        return
    about = " and ".join(images)
    without_images = [each for each in _captured(checked) if each.kind == "collection" and not each.has_images]
    for each in without_images:
        mend = f"use {each.db}; db.runCommand({{collMod: '{each.name}', changeStreamPreAndPostImages: {{enabled: true}}}})"
        message = f"{each.namespace} does not keep them, but the capture mode needs them"
        yield Finding(about, CheckVerdict.WRONG, message, mend, errors.SourceUnsuitable())
    if not without_images:
        yield Finding(about, CheckVerdict.FINE, "enabled on every collection")


QUESTIONS: tuple[Question, ...] = (_collections, _names_meet, _stream, _start, _snapshot_reads, _filters, _oplog, _images)


def _grant(client: mongodb.Client, db: str | None, why: str = "") -> str:
    """What to do about a missing privilege on a database, or on all."""
    if not mongodb.has_user(client):
        return "the connection string names no user: add one, as mongodb://user:password@host"
    role = f"{{role: 'read', db: '{db}'}}" if db else "'readAnyDatabase'"
    return f"db.grantRolesToUser(<user>, [{role}]){why}"
