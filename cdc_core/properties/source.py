"""The properties of `source`, each with its name, type, default and meaning.

`PROPERTIES` is used to read settings files (`cdc_core.settings.source_section`) and connector files
(`cdc_core.settings.debezium_import`), for defaults, and to render the table in docs/settings.md. Their names are those of
the attributes of `Source`, with dots instead of underscores. Properties that only have a meaning in Kafka
Connect are in `FOREIGN`, each with the reason, so that every line of an imported connector gets an answer.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from cdc_core.properties import types as values


class CaptureMode(enum.Enum):
    """`capture.mode`: what updates contain."""

    CHANGE_STREAMS = "change_streams"
    UPDATE_FULL = "change_streams_update_full"
    WITH_PRE_IMAGE = "change_streams_with_pre_image"
    UPDATE_FULL_WITH_PRE_IMAGE = "change_streams_update_full_with_pre_image"

    @property
    def has_full_updates(self) -> bool:
        """Updates have the whole document, looked up or from its post-image."""
        return self in (CaptureMode.UPDATE_FULL, CaptureMode.UPDATE_FULL_WITH_PRE_IMAGE)

    @property
    def has_pre_images(self) -> bool:
        """Updates, replaces and deletes have the document before them, if the collection keeps pre-images."""
        return self in (CaptureMode.WITH_PRE_IMAGE, CaptureMode.UPDATE_FULL_WITH_PRE_IMAGE)


class FullUpdateType(enum.Enum):
    """`capture.mode.full.update.type`: where the whole document of an update comes from."""

    LOOKUP = "lookup"
    POST_IMAGE = "post_image"


class CaptureScope(enum.Enum):
    """`capture.scope`: what the change stream is opened on."""

    DEPLOYMENT = "deployment"
    DATABASE = "database"
    COLLECTION = "collection"


class MatchMode(enum.Enum):
    """`filters.match.mode`: how the entries of include and exclude lists are read."""

    REGEX = "regex"
    LITERAL = "literal"


class SnapshotMode(enum.Enum):
    """`snapshot.mode`: when a start takes a snapshot; the older name `never` reads as `NO_DATA`."""

    ALWAYS = "always"
    INITIAL = "initial"
    INITIAL_ONLY = "initial_only"
    NO_DATA = "no_data"
    WHEN_NEEDED = "when_needed"
    CONFIGURATION_BASED = "configuration_based"
    CUSTOM = "custom"


class PipelineOrder(enum.Enum):
    """`cursor.pipeline.order`: the given stages after, before, or instead of the filters."""

    INTERNAL_FIRST = "internal_first"
    USER_FIRST = "user_first"
    USER_ONLY = "user_only"


class OversizeMode(enum.Enum):
    """`cursor.oversize.handling.mode`: what happens to an event above 16 MB."""

    FAIL = "fail"
    SKIP = "skip"
    SPLIT = "split"


class LimitAction(enum.Enum):
    """`guardrail.collections.limit.action`."""

    WARN = "warn"
    FAIL = "fail"


class Operation(enum.Enum):
    """An entry of `skipped.operations`."""

    CREATE = "c"
    UPDATE = "u"
    DELETE = "d"
    TRUNCATE = "t"
    READ = "r"
    NONE = "none"


class SignalChannel(enum.Enum):
    """An entry of `signal.enabled.channels`."""

    SOURCE = "source"
    FILE = "file"
    TABLE = "table"
    KAFKA = "kafka"


class NotificationChannel(enum.Enum):
    """An entry of `notification.enabled.channels`; `sink` is a Kafka topic."""

    LOG = "log"
    TABLE = "table"
    SINK = "sink"


MEBIBYTE = 1024 * 1024


@dataclass(frozen=True)
class Property:
    """One row of the table of properties.

    `debezium_default` is the connector's default if it differs, else empty.
    """

    name: str
    type: values.PropertyType
    default: Any
    doc: str
    ours: bool = False
    debezium_default: str = ""

    @property
    def attribute(self) -> str:
        """The attribute of `Source`."""
        return self.name.replace(".", "_").lower()

    @property
    def is_required(self) -> bool:
        """Whether a settings file must set it."""
        return self.default is MISSING

    @property
    def default_text(self) -> str:
        """The default as in a settings file; empty for none."""
        return "" if self.is_required else values.written(self.default)


@dataclass(frozen=True)
class Family:
    """Properties with a common prefix; the rest of the name is an option of Kafka's client, as in librdkafka."""

    prefix: str
    doc: str

    @property
    def attribute(self) -> str:
        """The attribute of `Source` with the options by name."""
        return self.prefix.rstrip(".").replace(".", "_")


def _property(type_: values.PropertyType, default: Any, doc: str, **more: Any) -> Any:
    return field(default=default, metadata={"type": type_, "default": default, "doc": doc, **more})


def _family(prefix: str, doc: str) -> Any:
    return field(default_factory=dict, metadata={"family": Family(prefix, doc)})


_LONGEST_MS = 10**12
"""31 years. Waiting for ten times as long overflows the system's clock."""
_MILLISECONDS = values.Integer(0, _LONGEST_MS)


@dataclass(frozen=True, kw_only=True)
class Source:
    """The validated `source` section, with one attribute per property."""

    # Connection
    mongodb_connection_string: values.Reference = _property(
        values.ConnectionString(), MISSING, "The replica set or mongos routers. Options in it override the properties below."
    )
    mongodb_user: values.Reference | None = _property(values.Referable(), None, "The user name, or a reference to it.")
    mongodb_password: values.Reference | None = _property(
        values.Secret(), None, "A reference to the password, never the password."
    )
    mongodb_authsource: str = _property(values.Text(), "admin", "The database that holds the user.")
    mongodb_ssl_enabled: bool = _property(values.Boolean(), False, "Whether connections use TLS.")
    mongodb_ssl_invalid_hostname_allowed: bool = _property(
        values.Boolean(), False, "Whether to accept a server certificate for another host name."
    )
    mongodb_ssl_ca_file: str | None = _property(
        values.Text(), None, "A PEM file with the trusted certificate authorities (the driver's tlsCAFile).", ours=True
    )
    mongodb_ssl_certificate_key_file: str | None = _property(
        values.Text(),
        None,
        "A PEM file with the client's certificate and key (the driver's tlsCertificateKeyFile).",
        ours=True,
    )
    mongodb_ssl_certificate_key_file_password: values.Reference | None = _property(
        values.Secret(), None, "A reference to the password of that key.", ours=True
    )
    mongodb_connect_timeout_ms: int = _property(
        _MILLISECONDS, 10_000, "How long opening a connection may take; 0 for no limit."
    )
    mongodb_server_selection_timeout_ms: int = _property(
        values.Integer(1, _LONGEST_MS), 30_000, "How long to wait for an available server, for example during an election."
    )
    mongodb_socket_timeout_ms: int = _property(_MILLISECONDS, 0, "How long one answer may take; 0 for no limit.")
    mongodb_heartbeat_frequency_ms: int = _property(
        values.Integer(1, _LONGEST_MS), 10_000, "How often the driver checks each server; less than 500 counts as 500."
    )

    # What is captured
    database_include_list: tuple[str, ...] = _property(values.Patterns(), (), "The databases to capture; all when empty.")
    database_exclude_list: tuple[str, ...] = _property(
        values.Patterns(), (), "The databases to leave out; not together with the include list."
    )
    collection_include_list: tuple[str, ...] = _property(
        values.Patterns(), (), "The collections to capture, as database.collection; all when empty."
    )
    collection_exclude_list: tuple[str, ...] = _property(
        values.Patterns(), (), "The collections to leave out, as database.collection; not together with the include list."
    )
    filters_match_mode: MatchMode = _property(
        values.Choice(MatchMode),
        MatchMode.REGEX,
        "Whether the entries of these lists are regular expressions that match the whole name, or literal names. "
        "Both ignore case.",
    )
    field_exclude_list: tuple[str, ...] = _property(
        values.SelectionList(),
        (),
        "Fields to remove from every event, as database.collection.field.nested. * stands for any characters in "
        "the database or collection name, and for one whole field of the path.",
    )
    field_renames: tuple[str, ...] = _property(
        values.SelectionList(),
        (),
        "New names for fields, as database.collection.field.nested:name, applied in the order of the list. A field "
        "is not renamed to a name that the document already has (a warning says so); an update that holds only its "
        "changes cannot detect this.",
    )
    skipped_operations: tuple[Operation, ...] = _property(
        values.Choices(Operation),
        (Operation.TRUNCATE,),
        "Operations that are not captured: c, u, d. none, r and t (truncate, which MongoDB does not have) skip nothing; none stands alone.",
    )

    # How it is captured
    capture_mode: CaptureMode = _property(
        values.Choice(CaptureMode, {"change_streams_update_full_with_pre-image": CaptureMode.UPDATE_FULL_WITH_PRE_IMAGE}),
        CaptureMode.UPDATE_FULL,
        "Whether updates include the whole document, and the document before the change.",
    )
    capture_mode_full_update_type: FullUpdateType = _property(
        values.Choice(FullUpdateType),
        FullUpdateType.LOOKUP,
        "Whether the whole document is looked up (it may be newer than its event) or is the post-image.",
    )
    capture_scope: CaptureScope | None = _property(
        values.Choice(CaptureScope),
        None,
        "What the stream is opened on. By default the deployment, or the database if the lists name only one.",
        debezium_default="deployment",
    )
    capture_target: str | None = _property(
        values.Text(), None, "The database, or database.collection, for the scopes database and collection."
    )
    capture_start_op_time: int = _property(
        values.Integer(-1, 2**64 - 1),
        -1,
        "The operation time (seconds * 2^32 + increment) at which a new stream starts; -1 for now.",
    )
    cursor_pipeline: str | None = _property(
        values.Stages(), None, "Aggregation stages for the change stream, as a JSON array (Extended JSON)."
    )
    cursor_pipeline_order: PipelineOrder = _property(
        values.Choice(PipelineOrder),
        PipelineOrder.INTERNAL_FIRST,
        "Whether these stages run after, before, or instead of the built-in filters.",
    )
    cursor_max_await_time_ms: int = _property(
        _MILLISECONDS,
        0,
        "How long the server may wait for an event before it returns an empty answer; 0 for the server's default.",
    )
    cursor_oversize_handling_mode: OversizeMode = _property(
        values.Choice(OversizeMode),
        OversizeMode.FAIL,
        "Whether an event above 16 MB stops the capture, is skipped and counted, or arrives in fragments (MongoDB 6.0.9 or later).",
    )
    cursor_oversize_skip_threshold: int = _property(
        values.Integer(0), 0, "Needed with skip: events whose document is larger than this many bytes are left out."
    )
    provide_transaction_metadata: bool = _property(
        values.Boolean(), False, "Whether events carry their transaction, with extra rows for its begin and end."
    )
    tombstones_on_delete: bool = _property(
        values.Boolean(),
        True,
        "Accepted, without effect: tombstones are for Kafka's topic compaction, and tables do not need them.",
    )

    # Snapshots
    snapshot_mode: SnapshotMode = _property(
        values.Choice(SnapshotMode, {"never": SnapshotMode.NO_DATA}),
        SnapshotMode.INITIAL,
        "When a start takes a snapshot. initial: without a position. when_needed: also if the position was lost. initial_only: as "
        "initial, and no stream follows. always: at each start. no_data (formerly never): not at all.",
    )
    snapshot_mode_configuration_based_snapshot_data: bool = _property(
        values.Boolean(), False, "configuration_based: whether a start without a position takes a snapshot."
    )
    snapshot_mode_configuration_based_snapshot_schema: bool = _property(
        values.Boolean(), False, "configuration_based: accepted; MongoDB has no schema to read."
    )
    snapshot_mode_configuration_based_start_stream: bool = _property(
        values.Boolean(), False, "configuration_based: whether the stream is read after the snapshot."
    )
    snapshot_mode_configuration_based_snapshot_on_schema_error: bool = _property(
        values.Boolean(), False, "configuration_based: accepted; MongoDB has no schema history to lose."
    )
    snapshot_mode_configuration_based_snapshot_on_data_error: bool = _property(
        values.Boolean(),
        False,
        "configuration_based: whether a position that the oplog no longer holds leads to a snapshot.",
    )
    snapshot_mode_custom_name: str | None = _property(
        values.Text(),
        None,
        "custom: the class that decides, as package.module:Class, with should_snapshot_data(has_position, is_snapshot_unfinished), should_stream() and should_snapshot_on_data_error().",
    )
    snapshot_delay_ms: int = _property(_MILLISECONDS, 0, "How long to wait before a snapshot of snapshot.mode.")
    snapshot_fetch_size: int = _property(
        values.Integer(0), 0, "Documents per answer during a snapshot; 0 for the server's default."
    )
    snapshot_max_threads: int | None = _property(
        values.Integer(1, 1024),
        None,
        "How many chunks of a snapshot are read in parallel. By default as many as Spark has cores, and as fit into the driver's memory.",
        debezium_default="1",
    )
    snapshot_include_collection_list: tuple[str, ...] = _property(
        values.Patterns(),
        (),
        "Which captured collections a snapshot of snapshot.mode reads; all when empty. Always regular expressions, whatever filters.match.mode is.",
    )
    snapshot_collection_filter_overrides: Mapping[str, str] = field(
        default_factory=dict,
        metadata={
            "type": values.SelectionList(),
            "default": (),
            "doc": "Collections of which a snapshot (but no incremental one) reads only what the find filter in "
            "snapshot.collection.filter.overrides.<database>.<collection> matches.",
        },
    )
    incremental_snapshot_chunk_size: int | None = _property(
        values.Integer(1),
        None,
        "Documents per chunk of an incremental snapshot. By default as many as fit into commit.max.bytes.",
        debezium_default="1024",
    )

    # Commits and bounds
    max_batch_size: int = _property(
        values.Integer(1),
        100_000,
        "Maximum number of events of the stream in one commit. A chunk of a snapshot is limited by commit.max.bytes.",
        debezium_default="2048",
    )
    commit_max_bytes: int = _property(
        # Arrow's `take` is limited to 2 GiB per column, and the text of a document may be several times as large as its BSON.
        values.Integer(1, 256 * MEBIBYTE),
        64 * MEBIBYTE,
        "Approximate maximum size of the events in one commit, in bytes.",
        ours=True,
    )
    commit_interval_ms: int = _property(
        values.Integer(1, _LONGEST_MS), 1_000, "How long an event may wait for its commit.", ours=True
    )
    max_queue_size_in_bytes: int = _property(
        values.Integer(0),
        256 * MEBIBYTE,
        "Maximum size of events that are read ahead of their commit, in bytes; 0, which is no limit in the connector, is the default here.",
        debezium_default="0",
    )
    heartbeat_interval_ms: int = _property(
        _MILLISECONDS,
        60_000,
        "How often the position of an idle stream is committed; 0 for never, which risks that it falls out of the oplog.",
        debezium_default="0",
    )
    poll_interval_ms: int = _property(
        values.Integer(1, _LONGEST_MS),
        500,
        "Accepted, without effect: the server holds its answer until there are events, and commits follow "
        "commit.interval.ms.",
    )

    # Signals and notifications
    signal_data_collection: str | None = _property(
        values.CollectionName(), None, "A collection of the source, as database.collection, whose inserts are signals."
    )
    signal_enabled_channels: tuple[SignalChannel, ...] = _property(
        values.Choices(SignalChannel),
        (SignalChannel.SOURCE, SignalChannel.TABLE),
        "Where signals come from: source, file, table (ops/signals, used by medallion signal), kafka.",
        debezium_default="source",
    )
    signal_poll_interval_ms: int = _property(
        values.Integer(1, _LONGEST_MS), 5_000, "How often a channel is polled for signals."
    )
    signal_file: str = _property(
        values.Text(), "file-signals.txt", "The file of the channel file, with one JSON signal per line."
    )
    signal_kafka_topic: str | None = _property(
        values.Text(),
        None,
        "The topic of the channel kafka; <name>-signal by default. The message key is the pipeline's name.",
    )
    signal_kafka_bootstrap_servers: str | None = _property(
        values.Text(), None, "The brokers of that topic, as host:port,host:port."
    )
    signal_kafka_groupid: str = _property(
        values.Text(),
        "kafka-signal",
        "The consumer group that stores the offset in that topic. Pipelines that share a topic need different groups.",
        name="signal.kafka.groupId",
    )
    signal_consumer: Mapping[str, values.Reference] = _family(
        "signal.consumer.", "Options of the client that reads that topic, such as signal.consumer.security.protocol."
    )
    notification_enabled_channels: tuple[NotificationChannel, ...] = _property(
        values.Choices(NotificationChannel),
        (),
        "Where notifications go: log, table (ops/notifications), sink (a Kafka topic).",
    )
    notification_sink_topic_name: str | None = _property(values.Text(), None, "The topic of the channel sink.")
    producer_override: Mapping[str, values.Reference] = _family(
        "producer.override.",
        "Options of the client that writes that topic. Its brokers are signal.kafka.bootstrap.servers, unless "
        "producer.override.bootstrap.servers names others.",
    )

    # Guards and retries
    guardrail_collections_max: int = _property(
        values.Integer(0), 0, "Maximum number of captured collections; 0 for no limit."
    )
    guardrail_collections_limit_action: LimitAction = _property(
        values.Choice(LimitAction), LimitAction.WARN, "What happens when that number is exceeded."
    )
    errors_max_retries: int = _property(
        values.Integer(-1),
        -1,
        "How many times in a row the capture retries when the connection to the source is lost; -1 for no limit, 0 "
        "for never.",
    )
    errors_retry_delay_initial_ms: int = _property(
        values.Integer(1, _LONGEST_MS), 300, "The wait before the first retry; it doubles with each retry."
    )
    errors_retry_delay_max_ms: int = _property(
        values.Integer(1, _LONGEST_MS), 10_000, "The longest wait between two retries."
    )
    retriable_restart_connector_wait_ms: int = _property(
        _MILLISECONDS, 10_000, "The wait before the capture starts over, if the source was lost and retrying did not help."
    )

    # Metrics
    metrics_port: int | None = _property(
        values.Integer(1, 65_535), None, "The port of the capture's Prometheus metrics. By default there is none.", ours=True
    )
    metrics_address: str = _property(values.Text(), "0.0.0.0", "The address on which that port listens.", ours=True)
    oplog_headroom_warning_hours: int = _property(
        values.Integer(0),
        24,
        "Log a warning if the oplog would lose the position in fewer hours than this; 0 for never.",
        ours=True,
    )

    topic_prefix: str | None = _property(
        values.Text(), None, "The pipeline's name, in configurations copied from a connector. Must equal `name`."
    )


PROPERTIES: tuple[Property, ...] = tuple(
    Property(**{"name": each.name.replace("_", "."), **each.metadata}) for each in fields(Source) if "type" in each.metadata
)

FAMILIES: tuple[Family, ...] = tuple(each.metadata["family"] for each in fields(Source) if "family" in each.metadata)

FILTER_OVERRIDE = "snapshot.collection.filter.overrides."
"""The prefix of properties with one collection's snapshot filter."""

PREFIXES = (FILTER_OVERRIDE, *(each.prefix for each in FAMILIES))
"""The prefixes of properties that a table cannot list."""

_JAVAS: Mapping[str, str] = {
    "sasl.jaas.config": "give sasl.username and sasl.password",
    "sasl.client.callback.handler.class": "it names a Java class",
    "sasl.login.callback.handler.class": "it names a Java class",
    "key.serializer": "keys and values are JSON",
    "value.serializer": "keys and values are JSON",
    "key.deserializer": "keys and values are JSON",
    "value.deserializer": "keys and values are JSON",
    "interceptor.classes": "it names Java classes",
    "ssl.truststore.location": "give ssl.ca.location, a PEM file",
    "ssl.truststore.password": "give ssl.ca.location, a PEM file",
    "ssl.truststore.type": "give ssl.ca.location, a PEM file",
    "ssl.truststore.certificates": "give ssl.ca.pem",
    "ssl.keystore.certificate.chain": "give ssl.certificate.pem",
    "ssl.keystore.key": "give ssl.key.pem, a secret",
    "ssl.keystore.type": "a key store is PKCS#12; for PEM files, ssl.certificate.location and ssl.key.location",
    "max.poll.records": "every look takes all that has come",
    "max.request.size": "give message.max.bytes",
    "buffer.memory": "give queue.buffering.max.kbytes",
    "max.block.ms": "nothing here waits until a message is sent",
    "send.buffer.bytes": "give socket.send.buffer.bytes",
    "receive.buffer.bytes": "give socket.receive.buffer.bytes",
    "fetch.max.wait.ms": "give fetch.wait.max.ms",
    "default.api.timeout.ms": "the channel sets its own limits",
    "exclude.internal.topics": "the topic is given by its name",
    "metadata.max.idle.ms": "it bounds a cache of the Java client",
    "partitioner.class": "give partitioner",
    "metric.reporters": "it names Java classes",
    "security.providers": "it names Java classes",
    "sasl.login.class": "it names a Java class",
    **dict.fromkeys(
        (
            f"sasl.login.refresh.{each}"
            for each in ("window.factor", "window.jitter", "min.period.seconds", "buffer.seconds")
        ),
        "the client renews its login itself",
    ),
    **dict.fromkeys(
        ("ssl.protocol", "ssl.enabled.protocols", "ssl.provider"), "OpenSSL agrees with the broker on a version of TLS"
    ),
    **dict.fromkeys(
        ("ssl.trustmanager.algorithm", "ssl.keymanager.algorithm", "ssl.secure.random.implementation"),
        "it configures Java's TLS",
    ),
}


def of_javas_client(option: str) -> str | None:
    """What to do instead of an option that only Kafka's Java client has; None for others, which librdkafka may know."""
    return _JAVAS.get(option)


def is_secret(option: str) -> bool:
    """Whether an option of Kafka's client is a secret."""
    return option.endswith(("password", "passphrase", "secret", "key.pem"))


_KAFKA = "it configures Kafka Connect, and there is no Kafka here"
_TOPIC = "it names Kafka topics; tables are named after databases and collections"
_SCHEMA = "it shapes Kafka Connect's schemas; column names follow silver's field.name.adjustment.mode"
_PEM = "Java key stores are not read; give PEM files: mongodb.ssl.ca.file, mongodb.ssl.certificate.key.file"
_QUEUE = "events read ahead are bounded by bytes here: max.queue.size.in.bytes"
_JAVA = "it names a Java class"
_SERVERS = "the driver watches the servers: mongodb.heartbeat.frequency.ms"
_RETIRED = "the connector itself no longer reads it; see errors.max.retries and errors.retry.delay.*"
_METRICS = "it configures Java's metrics"
_RELATIONAL = "it has no effect for MongoDB in the connector either"
_BAD_EVENTS = "an event that cannot be applied goes to the quarantine table"

FOREIGN: Mapping[str, str] = {
    "connector.class": _KAFKA,
    "connector.client.config.override.policy": _KAFKA,
    "tasks.max": _KAFKA,
    "tasks.max.enforce": _KAFKA,
    "name": "the pipeline is named at the top of the file, by `name`",
    "plugin.version": _KAFKA,
    "config.action.reload": _KAFKA,
    "config.providers*": _KAFKA,
    "key.converter*": _KAFKA,
    "value.converter*": _KAFKA,
    "header.converter*": _KAFKA,
    "converters*": _KAFKA,
    "transforms": "the options of ExtractNewDocumentState go under silver.defaults or silver.collections",
    "transforms.*": "the options of ExtractNewDocumentState go under silver.defaults or silver.collections",
    "predicates*": _KAFKA,
    "errors.tolerance": _BAD_EVENTS,
    "errors.log.enable": _BAD_EVENTS,
    "errors.log.include.messages": _BAD_EVENTS,
    "errors.retry.timeout": _KAFKA,
    "errors.deadletterqueue.*": _BAD_EVENTS,
    "exactly.once.support": "every layer is exactly once",
    "transaction.boundary*": _KAFKA,
    "offset.*": "the position is in the bronze table",
    "offsets.storage.topic": "the position is in the bronze table",
    "producer.*": _KAFKA,
    "consumer.*": _KAFKA,
    "admin.*": _KAFKA,
    "signal.kafka.poll.timeout.ms": "the topic is looked at as often as the other channels: signal.poll.interval.ms",
    "signal.emit.failure.*": _RELATIONAL,
    "topic.*": _TOPIC,
    "heartbeat.topics.prefix": _TOPIC,
    "transaction.topic": _TOPIC,
    "post.processors*": "post processors are Java classes, and MongoDB has none that ship with Debezium",
    "extended.headers.enabled": _KAFKA,
    "json.serialization.mode": "bronze holds type-exact Extended JSON v2",
    "schema.name.adjustment.mode": _SCHEMA,
    "field.name.adjustment.mode": "give it under silver.defaults",
    "schema.history.*": _RELATIONAL,
    "sanitize.field.names": "give it under silver.defaults",
    "skip.messages.without.change": _RELATIONAL,
    "max.queue.size": _QUEUE,
    "queue.provider.type": _QUEUE,
    "poll.dispatch.interval.ms": _QUEUE,
    "streaming.delay.ms": "the stream opens before the snapshot and does not wait for it",
    "incremental.snapshot.watermarking.strategy": "snapshots read at a cluster time and write no watermarks",
    "incremental.snapshot.allow.schema.changes": _RELATIONAL,
    "event.processing.failure.handling.mode": _BAD_EVENTS,
    "event.converting.failure.handling.mode": _BAD_EVENTS,
    "transaction.metadata.factory": _JAVA,
    "sourceinfo.struct.maker": _JAVA,
    "query.fetch.size": _RELATIONAL,
    "mongodb.authentication.class": "mechanisms are named in the connection string, as authMechanism",
    "mongodb.ssl.keystore*": _PEM,
    "mongodb.ssl.truststore*": _PEM,
    "mongodb.poll.interval.ms": _SERVERS,
    "mongodb.poll.interval.sec": _SERVERS,
    "mongodb.task.id": _KAFKA,
    "mongodb.hosts": "give the hosts in mongodb.connection.string",
    "mongodb.name": "the pipeline is named at the top of the file, by `name`",
    "mongodb.members.auto.discover": "the driver discovers the members by itself",
    "mongodb.connection.mode": "the driver tells replica sets and mongos apart by itself",
    "mongodb.connection.string.shard.params": "shards are read through mongos; give its options in mongodb.connection.string",
    "connect.max.attempts": _RETIRED,
    "connect.backoff.initial.delay.ms": _RETIRED,
    "connect.backoff.max.delay.ms": _RETIRED,
    "initial.sync.max.threads": "its name is snapshot.max.threads now",
    "source.struct.version": "bronze holds the source block of today's version",
    "statistics.metrics.enabled": _METRICS,
    "custom.metric.tags": _METRICS,
    "custom.sanitize.pattern": "no value of a setting that holds a secret is logged here",
    "connection.validation.timeout.ms": "`medallion check` obeys mongodb.server.selection.timeout.ms",
    "executor.shutdown.timeout.ms": _KAFKA,
    "openlineage.*": "Spark's own OpenLineage listener sees every table that is written",
    "internal.*": "it is internal to the connector",
}
"""Properties of a connector that have no meaning here, each with the reason; a final ``*`` matches any suffix."""


RENAMED: Mapping[str, str] = {
    "database.whitelist": "database.include.list",
    "database.blacklist": "database.exclude.list",
    "collection.whitelist": "collection.include.list",
    "collection.blacklist": "collection.exclude.list",
    "field.blacklist": "field.exclude.list",
    "initial.sync.max.threads": "snapshot.max.threads",
    "connect.max.attempts": "errors.max.retries",
    "connect.backoff.initial.delay.ms": "errors.retry.delay.initial.ms",
    "connect.backoff.max.delay.ms": "errors.retry.delay.max.ms",
}
"""Names in older versions, and their current names."""


def is_for_kafka_only(name: str) -> bool:
    """Whether a property only has a meaning in Kafka."""
    return describe_foreign(name) in (_KAFKA, _TOPIC, _SCHEMA)


def describe_foreign(name: str) -> str | None:
    """Why a property of a connector has no meaning here; None for properties of `Source` and unknown names."""
    if name in BY_NAME:
        return None
    if name in FOREIGN:
        return FOREIGN[name]
    return next((why for pattern, why in FOREIGN.items() if pattern.endswith("*") and name.startswith(pattern[:-1])), None)


BY_NAME: Mapping[str, Property] = {each.name: each for each in PROPERTIES}
