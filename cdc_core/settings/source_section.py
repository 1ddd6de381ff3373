"""The section `source` of a settings document: reads each property by its type, then cross-checks them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from cdc_core.properties import source as properties
from cdc_core.properties import types as values
from cdc_core.properties import unwrap as unwrap_options
from cdc_core.properties.source import (
    CaptureScope,
    Family,
    MatchMode,
    NotificationChannel,
    Operation,
    OversizeMode,
    PipelineOrder,
    Property,
    SignalChannel,
    SnapshotMode,
    Source,
)
from cdc_core.properties.types import Reference
from cdc_core.settings.section_reader import SectionReader, join_path
from cdc_core.stream import cursor_pipeline, filters, patterns
from cdc_core.stream import fields as field_filters

_UNKNOWN_SOURCE = Source(mongodb_connection_string=Reference(""))
_OF_THE_CHANNEL = {
    "signal.consumer.bootstrap.servers": "signal.kafka.bootstrap.servers",
    "signal.consumer.group.id": "signal.kafka.groupId",
    "signal.consumer.enable.auto.commit": "the position is committed when the signal is in bronze",
}
_EXCLUSIVE = (
    ("database.include.list", "database.exclude.list"),
    ("collection.include.list", "collection.exclude.list"),
)
_SNAPSHOT_LIST = "snapshot.include.collection.list"
_PATTERN_LISTS = (
    "database.include.list",
    "database.exclude.list",
    "collection.include.list",
    "collection.exclude.list",
    _SNAPSHOT_LIST,
)


def read_source(reader: SectionReader, sections: Mapping[str, Any], name: str) -> Source:
    if sections.get("source") is None:
        reader.refuse("source", "a mapping with mongodb.connection.string is expected")
        return _UNKNOWN_SOURCE
    section = reader.section("source", sections["source"])
    _refuse_unknown_properties(reader, section)
    # First the match mode, which decides how the lists are read.
    is_literal = str(section.get("filters.match.mode")).strip().lower() == MatchMode.LITERAL.value
    property_values = {
        property_.attribute: _read_property(reader, property_, section, is_literal) for property_ in properties.PROPERTIES
    }
    overrides = _filter_overrides(reader, section, property_values["snapshot_collection_filter_overrides"])
    families = {family.attribute: _read_family(reader, family, section) for family in properties.FAMILIES}
    source = Source(**{**property_values, **families, "snapshot_collection_filter_overrides": overrides})
    if source.max_queue_size_in_bytes == 0:
        limit = properties.BY_NAME["max.queue.size.in.bytes"].default
        source = dataclasses.replace(source, max_queue_size_in_bytes=limit)
        reader.warnings.append(f"source.max.queue.size.in.bytes: 0 is no limit in the connector; the limit here is {limit}")
    for check in _CHECKS:
        check(reader, source, name)
    return source


def _read_property(reader: SectionReader, each: Property, section: Mapping[str, Any], is_literal: bool) -> Any:
    path = join_path("source", each.name)
    default = _UNKNOWN_SOURCE.mongodb_connection_string if each.is_required else each.default
    value = section.get(each.name)
    if value is None:
        if each.is_required:
            reader.refuse(path, f"{each.type.expected} is expected", "${env:MONGODB_URI}, for example")
        return default
    has_names = is_literal and isinstance(each.type, values.Patterns) and each.name != _SNAPSHOT_LIST
    type_ = values.SelectionList() if has_names else each.type
    return reader.value(path, type_, value, default)


def _read_family(reader: SectionReader, family: Family, section: Mapping[str, Any]) -> dict[str, Reference]:
    """The options of a Kafka client; secrets must be references."""
    options = {}
    for name, value in section.items():
        option = name.removeprefix(family.prefix)
        path = join_path("source", name)
        if not name.startswith(family.prefix) or value is None:
            continue
        if (reason := properties.of_javas_client(option)) is not None:
            reader.refuse(path, "it is an option of Kafka's Java client", reason)
        elif (alternative := _OF_THE_CHANNEL.get(name)) is not None:
            reader.refuse(path, "the channel sets it itself", alternative)
        else:
            type_ = values.Secret() if properties.is_secret(option) else values.Referable()
            text = values.written(value) if isinstance(value, (bool, int, float)) else value
            options[option] = reader.value(path, type_, text, Reference(""))
    return options


def _refuse_unknown_properties(reader: SectionReader, section: Mapping[str, Any]) -> None:
    for name, value in section.items():
        if name in properties.BY_NAME or name.startswith(properties.PREFIXES):
            continue
        path = join_path("source", name)
        if name in unwrap_options.NAMES:
            reader.refuse(path, "it is an option of silver", "put it under silver.defaults")
        elif (reason := properties.describe_foreign(name)) is not None:
            reader.refuse(path, "it has no meaning here", reason)
        elif isinstance(value, Mapping) and any(known_name.startswith(f"{name}.") for known_name in properties.BY_NAME):
            reader.refuse(path, "properties are written in one line", f"{name}.{next(iter(value), '…')}: …")
        else:
            current_name = properties.RENAMED.get(name)
            hint = f"its name is {current_name} now" if current_name else values.did_you_mean(name, properties.BY_NAME)
            reader.refuse(path, "there is no such property", hint)


def _filter_overrides(reader: SectionReader, section: Mapping[str, Any], listed: tuple[str, ...]) -> dict[str, str]:
    overrides = {
        name.removeprefix(properties.FILTER_OVERRIDE): filter_
        for name, filter_ in section.items()
        if name.startswith(properties.FILTER_OVERRIDE)
    }
    for namespace in overrides:
        if namespace not in listed:
            hint = "list it in snapshot.collection.filter.overrides"
            reader.refuse(f"source.{properties.FILTER_OVERRIDE}{namespace}", "the collection is not listed", hint)
    for namespace in listed:
        if "." not in namespace:
            path = "source.snapshot.collection.filter.overrides"
            reader.refuse(path, f"database.collection is expected, found {namespace}")
        elif namespace not in overrides:
            hint = f"{properties.FILTER_OVERRIDE}{namespace} holds it"
            reader.refuse("source.snapshot.collection.filter.overrides", f"{namespace} has no filter", hint)
    return {
        namespace: reader.value(f"source.{properties.FILTER_OVERRIDE}{namespace}", values.FindFilter(), filter_, "{}")
        for namespace, filter_ in overrides.items()
    }


def _check_lists(reader: SectionReader, source: Source, name: str) -> None:
    for include, exclude in _EXCLUSIVE:
        if _value(source, include) and _value(source, exclude):
            reader.refuse(f"source.{exclude}", f"it does not stand beside {include}", "the include list alone decides")
    for list_name in _PATTERN_LISTS:
        if source.filters_match_mode is MatchMode.REGEX or list_name == _SNAPSHOT_LIST:
            _check_patterns(reader, list_name, _value(source, list_name))


def _check_patterns(reader: SectionReader, list_name: str, entries: tuple[str, ...]) -> None:
    for entry in entries:
        try:
            pattern = patterns.regex(entry)
        except values.InvalidValue as error:
            reader.refuse(f"source.{list_name}", f"{error.expected} is expected, found {entry}", error.hint)
            continue
        # A snapshot's collections are matched here by name; the server need not support the pattern.
        if pattern.server_text is None and list_name != _SNAPSHOT_LIST:
            reader.warnings.append(
                f"source.{list_name}: the server cannot be asked for {entry}; it sends every event, "
                "and the capture drops the others"
            )


def _check_fields(reader: SectionReader, source: Source, name: str) -> None:
    for list_name in ("field.exclude.list", "field.renames"):
        for entry in _value(source, list_name):
            excluded, renamed = ([entry], []) if list_name == "field.exclude.list" else ([], [entry])
            try:
                (rule,) = field_filters.read(excluded, renamed).entries
            except values.InvalidValue as error:
                reader.refuse(f"source.{list_name}", error.expected)
                continue
            if any("*" in step and step != field_filters.ANY for step in rule.path):
                reader.warnings.append(
                    f"source.{list_name}: the * of {entry} is part of a field's name; alone it stands for any one field"
                )


def _check_collections(reader: SectionReader, source: Source, name: str) -> None:
    for list_name in ("collection.include.list", "collection.exclude.list", _SNAPSHOT_LIST):
        for entry in _value(source, list_name):
            if "." in entry or patterns.literal(entry).text != entry:
                continue
            path, expected = f"source.{list_name}", f"database.collection is expected, found {entry}"
            if list_name != "collection.include.list":
                reader.warnings.append(f"{path}: {expected}, which matches no collection")
                continue
            is_literal = source.filters_match_mode is MatchMode.LITERAL
            hint = "database.include.list names whole databases" if is_literal else rf"{entry}\..*"
            reader.refuse(path, expected, hint)


def _check_connection(reader: SectionReader, source: Source, name: str) -> None:
    if source.mongodb_password is not None and source.mongodb_user is None:
        reader.refuse("source.mongodb.user", "it is expected beside mongodb.password")


def _check_capture(reader: SectionReader, source: Source, name: str) -> None:
    target = source.capture_target
    match source.capture_scope:
        case CaptureScope.DATABASE if target is None or "." in target:
            reader.refuse("source.capture.target", "the name of a database is expected beside capture.scope: database")
        case CaptureScope.COLLECTION if target is None or "." not in target.strip("."):
            expected = "database.collection is expected beside capture.scope: collection"
            reader.refuse("source.capture.target", expected)
    _warn_of_unread_signals(reader, source)
    if target is not None and source.capture_scope in (None, CaptureScope.DEPLOYMENT):
        reader.warnings.append("source.capture.target has no effect without capture.scope: database or collection")
    if source.cursor_pipeline_order is PipelineOrder.USER_ONLY and source.cursor_pipeline is None:
        reader.refuse("source.cursor.pipeline", "it is expected beside cursor.pipeline.order: user_only")
    if Operation.NONE in source.skipped_operations and len(source.skipped_operations) > 1:
        reader.refuse("source.skipped.operations", "none does not stand beside other operations", "Debezium refuses it, too")
    needs_description = not source.capture_mode.has_full_updates
    for problem in cursor_pipeline.problems(filters.user_stages(source), needs_description=needs_description):
        reader.refuse("source.cursor.pipeline", problem)
    skips = source.cursor_oversize_handling_mode is OversizeMode.SKIP
    if skips and source.cursor_oversize_skip_threshold == 0:
        reader.refuse("source.cursor.oversize.skip.threshold", "a size is expected beside the mode skip", "16777216")


def _warn_of_unread_signals(reader: SectionReader, source: Source) -> None:
    """Warns if the capture scope is narrower than the signal collection, whose inserts it then does not receive."""
    target, signals = source.capture_target, source.signal_data_collection
    if source.capture_scope in (None, CaptureScope.DEPLOYMENT) or target is None or signals is None:
        return
    if SignalChannel.SOURCE in source.signal_enabled_channels and not f"{signals}.".startswith(f"{target}."):
        reader.warnings.append(
            f"source.signal.data.collection: no signal comes from {signals}: the stream is of capture.target alone, {target}"
        )


def _check_modes(reader: SectionReader, source: Source, name: str) -> None:
    if source.snapshot_mode is SnapshotMode.CUSTOM and source.snapshot_mode_custom_name is None:
        reader.refuse("source.snapshot.mode.custom.name", "an import path is expected beside snapshot.mode: custom")
    if source.topic_prefix is not None and name and source.topic_prefix != name:
        reader.refuse("source.topic.prefix", f"the pipeline's name is expected, {name}", "or leave it out")
    if source.errors_retry_delay_max_ms < source.errors_retry_delay_initial_ms:
        reader.refuse("source.errors.retry.delay.max.ms", "no less than errors.retry.delay.initial.ms is expected")


def _check_kafka(reader: SectionReader, source: Source, name: str) -> None:
    listens = SignalChannel.KAFKA in source.signal_enabled_channels
    sinks = NotificationChannel.SINK in source.notification_enabled_channels
    brokers = source.signal_kafka_bootstrap_servers
    if listens and brokers is None:
        reader.refuse("source.signal.kafka.bootstrap.servers", "brokers are expected beside the channel kafka", "host:9092")
    if sinks and source.notification_sink_topic_name is None:
        reader.refuse("source.notification.sink.topic.name", "a topic is expected beside the channel sink")
    if sinks and brokers is None and "bootstrap.servers" not in source.producer_override:
        reader.refuse(
            "source.signal.kafka.bootstrap.servers", "brokers are expected beside the channel sink",
            "or producer.override.bootstrap.servers",
        )  # fmt: skip
    if source.signal_consumer and not listens:
        reader.warnings.append("source.signal.consumer.* has no effect: signal.enabled.channels does not name kafka")
    if source.producer_override and not sinks:
        reader.warnings.append("source.producer.override.* has no effect: notification.enabled.channels does not name sink")


_USED_BESIDE: Mapping[str, tuple[str, Callable[[Source], bool]]] = {
    "capture.mode.full.update.type": (
        "a capture.mode with full updates",
        lambda source: source.capture_mode.has_full_updates,
    ),
    "cursor.pipeline.order": ("cursor.pipeline", lambda source: source.cursor_pipeline is not None),
    "cursor.oversize.skip.threshold": (
        "cursor.oversize.handling.mode: skip",
        lambda source: source.cursor_oversize_handling_mode is OversizeMode.SKIP,
    ),
    "guardrail.collections.limit.action": (
        "guardrail.collections.max",
        lambda source: source.guardrail_collections_max > 0,
    ),
    "notification.sink.topic.name": (
        "sink in notification.enabled.channels",
        lambda source: NotificationChannel.SINK in source.notification_enabled_channels,
    ),
    "signal.data.collection": (
        "source in signal.enabled.channels",
        lambda source: SignalChannel.SOURCE in source.signal_enabled_channels,
    ),
    "signal.file": (
        "file in signal.enabled.channels",
        lambda source: SignalChannel.FILE in source.signal_enabled_channels,
    ),
    **dict.fromkeys(
        ("signal.kafka.topic", "signal.kafka.groupId"),
        (
            "kafka in signal.enabled.channels",
            lambda source: SignalChannel.KAFKA in source.signal_enabled_channels,
        ),
    ),
    **dict.fromkeys(
        (
            f"snapshot.mode.configuration.based.{each}"
            for each in ("snapshot.data", "start.stream", "snapshot.on.data.error")
        ),
        (
            "snapshot.mode: configuration_based",
            lambda source: source.snapshot_mode is SnapshotMode.CONFIGURATION_BASED,
        ),
    ),
    "snapshot.mode.custom.name": (
        "snapshot.mode: custom",
        lambda source: source.snapshot_mode is SnapshotMode.CUSTOM,
    ),
}
"""Properties that do nothing without another one, and whether that is there."""


def _warn_of_unused(reader: SectionReader, source: Source, name: str) -> None:
    for option, (other, is_used) in _USED_BESIDE.items():
        if _value(source, option) != properties.BY_NAME[option].default and not is_used(source):
            reader.warnings.append(f"source.{option} has no effect without {other}")


def _warn(reader: SectionReader, source: Source, name: str) -> None:
    if source.max_queue_size_in_bytes < source.commit_max_bytes:
        reader.warnings.append(
            "source.max.queue.size.in.bytes is below commit.max.bytes: nothing is read ahead while a commit fills up"
        )
    if source.heartbeat_interval_ms == 0:
        reader.warnings.append(
            "source.heartbeat.interval.ms is 0: the position of a quiet stream is not committed, "
            "and may fall out of the oplog"
        )
    if not source.tombstones_on_delete:
        reader.warnings.append("source.tombstones.on.delete has no effect: tables need no tombstones")


_CHECKS: tuple[Callable[[SectionReader, Source, str], None], ...] = (
    _check_connection,
    _check_lists,
    _check_fields,
    _check_collections,
    _check_capture,
    _check_modes,
    _check_kafka,
    _warn_of_unused,
    _warn,
)


def _value(source: Source, name: str) -> Any:
    return getattr(source, properties.BY_NAME[name].attribute)
