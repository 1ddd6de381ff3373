"""The settings of one pipeline: validated, frozen, and without a secret in them.

`parse` reads a whole document (what YAML or JSON gave) and reports all of its mistakes at once. References
such as ``${env:NAME}`` stay references: `pipelines.settings.secrets` resolves them at the last moment.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cdc_core import errors
from cdc_core.properties import source as properties
from cdc_core.properties import types as values
from cdc_core.properties import unwrap as unwrap_options
from cdc_core.properties.source import (
    PROPERTIES,
    CaptureMode,
    CaptureScope,
    Family,
    FullUpdateType,
    LimitAction,
    MatchMode,
    NotificationChannel,
    Operation,
    OversizeMode,
    PipelineOrder,
    Property,
    SignalChannel,
    SnapshotMode,
    Source,
    describe_foreign,
)
from cdc_core.properties.types import Reference
from cdc_core.schema.pins import parse_pins
from cdc_core.stream import cursor_pipeline, filters, patterns
from cdc_core.stream import fields as field_filters
from cdc_core.tables import layout as tables

__all__ = [
    "PROPERTIES",
    "CaptureMode",
    "CaptureScope",
    "CollectionSettings",
    "FullUpdateType",
    "Gold",
    "Lakehouse",
    "LimitAction",
    "Maintenance",
    "MatchMode",
    "NotificationChannel",
    "OnConflict",
    "OnGone",
    "Operation",
    "OversizeMode",
    "PipelineOrder",
    "Property",
    "QuietHours",
    "Reference",
    "Settings",
    "SignalChannel",
    "Silver",
    "SnapshotMode",
    "Source",
    "describe_foreign",
    "parse",
]


class OnConflict(enum.Enum):
    """`schema.on.conflict`: what becomes of a value that its column cannot hold and cannot be widened to."""

    RESCUE = "rescue"
    RETYPE = "retype"


class OnGone(enum.Enum):
    """`collection.drop.handling.mode` and `collection.rename.handling.mode`: what becomes of the rows of a collection
    whose documents are gone with it.
    """

    DELETE = "delete"
    KEEP = "keep"


@dataclass(frozen=True)
class Lakehouse:
    """Where the tables lie: below `root`, or in `catalog` as ``<schema_prefix><layer>.<table>``.

    `single_driver` vouches that one driver alone writes them, where the store cannot exclude a second one.
    """

    root: str | None = None
    catalog: str | None = None
    schema_prefix: str = ""
    single_driver: bool = False

    def layout(self) -> tables.Layout:
        """The names of the tables."""
        return tables.Layout(self.root, self.catalog, self.schema_prefix)


@dataclass(frozen=True)
class CollectionSettings:
    """What silver does with one collection.

    `schema` pins columns: dotted path to Spark type. `keep_document` is None where the capture mode decides.
    """

    unwrap: unwrap_options.UnwrapOptions = unwrap_options.UnwrapOptions()
    schema: Mapping[str, str] = field(default_factory=dict)
    on_conflict: OnConflict = OnConflict.RESCUE
    history: bool = False
    keep_document: bool | None = None
    map_fields: tuple[str, ...] = ()
    max_batch_events: int = 500_000
    on_drop: OnGone = OnGone.DELETE
    on_rename: OnGone = OnGone.DELETE


@dataclass(frozen=True)
class Silver:
    """Settings by collection; a collection without its own has the defaults."""

    defaults: CollectionSettings = CollectionSettings()
    collections: Mapping[str, CollectionSettings] = field(default_factory=dict)

    def for_collection(self, namespace: str) -> CollectionSettings:
        """The settings of `database.collection`."""
        return self.collections.get(namespace, self.defaults)


@dataclass(frozen=True)
class Gold:
    """The folders of SQL models and of expectations; None for none.

    `deletion_vectors` is None where new tables have them, and those that are there stay as they are.
    """

    models: str | None = None
    expectations: str | None = None
    deletion_vectors: bool | None = None


@dataclass(frozen=True)
class QuietHours:
    """A part of the day, in minutes since midnight UTC; it may go over midnight."""

    begin: int
    end: int

    def holds(self, minute: int) -> bool:
        """Whether a minute of the day is in it."""
        if self.begin <= self.end:
            return self.begin <= minute < self.end
        return minute >= self.begin or minute < self.end


@dataclass(frozen=True)
class Maintenance:
    """How long what is not the source's own is kept, in days (None: for ever), and when `run` maintains by itself."""

    ops_retention_days: int = 90
    deletes_retention_days: int = 90
    bronze_retention_days: int | None = None
    quiet_hours: QuietHours | None = None


@dataclass(frozen=True)
class Settings:
    """A whole settings file. Nothing that it prints is a secret."""

    name: str
    lakehouse: Lakehouse
    source: Source
    silver: Silver = Silver()
    gold: Gold = Gold()
    maintenance: Maintenance = Maintenance()
    warnings: tuple[str, ...] = ()


def parse(document: object, *, where: str = "") -> Settings:
    """The settings that `document` holds; `where` names it in messages.

    Raises `SettingsError` with every mistake: the path of the key, what was expected, and the nearest right
    name.
    """
    if not isinstance(document, Mapping):
        expected = "a mapping with the keys name, lakehouse and source"
        raise errors.SettingsError(errors.Problem(where, f"{expected} is expected, found {values.shown(document)}"))
    reader = _Reader()
    settings = _settings(reader, document)
    if reader.problems:
        raise errors.SettingsError(reader.problems)
    return dataclasses.replace(settings, warnings=tuple(reader.warnings))


@dataclass(frozen=True)
class _Key:
    """A key outside `source`: its type, and the value where it is left out."""

    type: values.Type
    default: object


_SECTIONS = ("name", "lakehouse", "source", "silver", "gold", "maintenance")
_LAKEHOUSE: Mapping[str, _Key] = {
    "root": _Key(values.Place("a folder or a URL"), None),
    "catalog": _Key(values.Place("the name of a catalog"), None),
    "schema_prefix": _Key(values.Place("a prefix for schemas"), ""),
    "single_driver": _Key(values.Boolean(), False),
}
_GOLD: Mapping[str, _Key] = {
    "models": _Key(values.Text("a folder"), None),
    "expectations": _Key(values.Text("a folder"), None),
    "delta.enableDeletionVectors": _Key(values.Boolean(), None),
}
_MAINTENANCE: Mapping[str, _Key] = {
    "ops.retention.days": _Key(values.Integer(1), 90),
    "deletes.retention.days": _Key(values.Integer(1), 90),
    "bronze.retention.days": _Key(values.Integer(1), None),
    "quiet.hours": _Key(values.Text("a time of day in UTC such as 02:00-05:00"), None),
}
_QUIET_HOURS = re.compile(r"([01]\d|2[0-3]):([0-5]\d)\s*-\s*([01]\d|2[0-3]):([0-5]\d)")
_COLLECTION: Mapping[str, _Key] = {
    "schema.on.conflict": _Key(values.Choice(OnConflict), OnConflict.RESCUE),
    "history": _Key(values.Boolean(), False),
    "keep.document": _Key(values.Boolean(), None),
    "map.fields": _Key(values.Names("a comma-separated list of dotted paths"), ()),
    "max.batch.events": _Key(values.Integer(1), 500_000),
    "collection.drop.handling.mode": _Key(values.Choice(OnGone), OnGone.DELETE),
    "collection.rename.handling.mode": _Key(values.Choice(OnGone), OnGone.DELETE),
}
_COLLECTION_NAMES = ("schema", *_COLLECTION, *unwrap_options.NAMES)
_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")
_SCHEMA_PREFIX = re.compile(r"[A-Za-z0-9_]*")
_TYPE_ALIASES = {"integer": "int", "long": "bigint"}
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
_PATTERN_LISTS = (
    "database.include.list",
    "database.exclude.list",
    "collection.include.list",
    "collection.exclude.list",
    "snapshot.include.collection.list",
)


class _Reader:
    """Gathers mistakes while settings are read; what cannot be read takes its default, so that reading goes
    on.
    """

    def __init__(self) -> None:
        self.problems: list[errors.Problem] = []
        self.warnings: list[str] = []

    def refuse(self, path: str, message: str, hint: str = "") -> None:
        self.problems.append(errors.Problem(path, message, hint))

    def value(self, path: str, type_: values.Type, found: object, default: Any) -> Any:
        """The value as its type reads it; secrets are never repeated."""
        try:
            return type_.read(found)
        except values.Refused as refused:
            hidden = isinstance(type_, (values.ConnectionString, values.Secret, values.Referable))
            seen = "" if hidden else f", found {values.shown(found)}"
            self.refuse(path, f"{refused.expected} is expected{seen}", refused.hint)
            return default

    def section(self, path: str, found: object) -> Mapping[str, Any]:
        """A mapping with texts as keys; empty for nothing."""
        if found is None:
            return {}
        if not isinstance(found, Mapping):
            self.refuse(path, f"a mapping is expected, found {values.shown(found)}")
            return {}
        for key in found:
            if not isinstance(key, str):
                self.refuse(_join(path, str(key)), "a text is expected as key", f'put it in quotes: "{key}"')
        return {key: value for key, value in found.items() if isinstance(key, str)}

    def keys(self, path: str, found: object, known: Mapping[str, _Key]) -> dict[str, Any]:
        """The values of a section with a closed set of keys."""
        section = self.section(path, found)
        self.unknown(path, section, tuple(known))
        return {name: self._key(path, name, key, section) for name, key in known.items()}

    def _key(self, path: str, name: str, key: _Key, section: Mapping[str, Any]) -> Any:
        found = section.get(name)
        return key.default if found is None else self.value(_join(path, name), key.type, found, key.default)

    def unknown(self, path: str, section: Mapping[str, Any], known: tuple[str, ...]) -> None:
        """Refuses every key that is not known."""
        for name in section:
            if name not in known:
                hint = values.did_you_mean(name, known) or f"known are {', '.join(known)}"
                self.refuse(_join(path, name), "there is no such setting", hint)


def _settings(reader: _Reader, document: Mapping[Any, Any]) -> Settings:
    sections = reader.section("", document)
    reader.unknown("", sections, _SECTIONS)
    name = _name(reader, sections)
    source = _source(reader, sections, name)
    return Settings(
        name=name,
        lakehouse=_lakehouse(reader, sections),
        source=source,
        silver=_silver(reader, sections.get("silver"), source),
        gold=_gold(reader, sections.get("gold")),
        maintenance=_maintenance(reader, sections.get("maintenance")),
    )


def _name(reader: _Reader, sections: Mapping[str, Any]) -> str:
    found = sections.get("name")
    if found is None:
        reader.refuse("name", "a name for the pipeline is expected", "a pasted connector has it as topic.prefix")
        return ""
    name: str = reader.value("name", values.Text(), found, "")
    if name and not _NAME.fullmatch(name):
        fit = re.sub(r"[^A-Za-z0-9_-]", "_", name)[:100]
        reader.refuse("name", "letters, digits, _ and - are expected, as it names tables", f"for example {fit}")
    return name


def _lakehouse(reader: _Reader, sections: Mapping[str, Any]) -> Lakehouse:
    found = sections.get("lakehouse")
    if found is None:
        reader.refuse("lakehouse", "root or catalog is expected", "root: ./lakehouse")
        return Lakehouse()
    before = len(reader.problems)
    lakehouse = Lakehouse(**reader.keys("lakehouse", found, _LAKEHOUSE))
    if len(reader.problems) == before:
        _check_lakehouse(reader, lakehouse)
    return lakehouse


def _check_lakehouse(reader: _Reader, lakehouse: Lakehouse) -> None:
    if (lakehouse.root is None) == (lakehouse.catalog is None):
        reader.refuse("lakehouse", "either root or catalog is expected", "a folder's path, or the name of a catalog")
    if lakehouse.schema_prefix and lakehouse.catalog is None:
        reader.refuse("lakehouse.schema_prefix", "it stands beside catalog only")
    if not _SCHEMA_PREFIX.fullmatch(values.without_references(lakehouse.schema_prefix)):
        reader.refuse("lakehouse.schema_prefix", "letters, digits and _ are expected")


def _source(reader: _Reader, sections: Mapping[str, Any], name: str) -> Source:
    if sections.get("source") is None:
        reader.refuse("source", "a mapping with mongodb.connection.string is expected")
        return _UNKNOWN_SOURCE
    section = reader.section("source", sections["source"])
    _refuse_unknown_properties(reader, section)
    is_literal = str(section.get("filters.match.mode")).strip().lower() == MatchMode.LITERAL.value
    found = {each.attribute: _property(reader, each, section, is_literal) for each in PROPERTIES}
    overrides = _filter_overrides(reader, section, found["snapshot_collection_filter_overrides"])
    families = {each.attribute: _family(reader, each, section) for each in properties.FAMILIES}
    source = Source(**{**found, **families, "snapshot_collection_filter_overrides": overrides})
    for check in _CHECKS:
        check(reader, source, name)
    return source


def _property(reader: _Reader, each: Property, section: Mapping[str, Any], is_literal: bool) -> Any:
    path = _join("source", each.name)
    default = _UNKNOWN_SOURCE.mongodb_connection_string if each.is_required else each.default
    found = section.get(each.name)
    if found is None:
        if each.is_required:
            reader.refuse(path, f"{each.type.expected} is expected", "${env:MONGODB_URI}, for example")
        return default
    type_ = values.Names() if is_literal and isinstance(each.type, values.Patterns) else each.type
    return reader.value(path, type_, found, default)


def _family(reader: _Reader, family: Family, section: Mapping[str, Any]) -> dict[str, Reference]:
    """The options of a Kafka client; what hides a secret is a reference."""
    found = {}
    for name, value in section.items():
        option = name.removeprefix(family.prefix)
        path = _join("source", name)
        if not name.startswith(family.prefix):
            continue
        if (why := properties.of_javas_client(option)) is not None:
            reader.refuse(path, "it is an option of Kafka's Java client", why)
        elif (instead := _OF_THE_CHANNEL.get(name)) is not None:
            reader.refuse(path, "the channel sets it itself", instead)
        else:
            type_ = values.Secret() if properties.is_secret(option) else values.Referable()
            text = str(value).lower() if isinstance(value, bool) else str(value)
            found[option] = reader.value(path, type_, text, Reference(""))
    return found


def _refuse_unknown_properties(reader: _Reader, section: Mapping[str, Any]) -> None:
    for name, found in section.items():
        if name in properties.BY_NAME or name.startswith(properties.PREFIXES):
            continue
        path = _join("source", name)
        if name in unwrap_options.NAMES:
            reader.refuse(path, "it is an option of silver", "put it under silver.defaults")
        elif (why := describe_foreign(name)) is not None:
            reader.refuse(path, "it has no meaning here", why)
        elif isinstance(found, Mapping) and any(known.startswith(f"{name}.") for known in properties.BY_NAME):
            reader.refuse(path, "properties are written in one line", f"{name}.{next(iter(found), '…')}: …")
        else:
            hint = values.did_you_mean(name, properties.BY_NAME)
            reader.refuse(path, "there is no such property", hint)


def _filter_overrides(reader: _Reader, section: Mapping[str, Any], listed: tuple[str, ...]) -> dict[str, str]:
    given = {
        name.removeprefix(properties.FILTER_OVERRIDE): found
        for name, found in section.items()
        if name.startswith(properties.FILTER_OVERRIDE)
    }
    for namespace in given:
        if namespace not in listed:
            hint = "list it in snapshot.collection.filter.overrides"
            reader.refuse(f"source.{properties.FILTER_OVERRIDE}{namespace}", "the collection is not listed", hint)
    for namespace in listed:
        if namespace not in given:
            hint = f"{properties.FILTER_OVERRIDE}{namespace} holds it"
            reader.refuse("source.snapshot.collection.filter.overrides", f"{namespace} has no filter", hint)
    return {
        namespace: reader.value(f"source.{properties.FILTER_OVERRIDE}{namespace}", values.FindFilter(), found, "{}")
        for namespace, found in given.items()
    }


def _check_lists(reader: _Reader, source: Source, name: str) -> None:
    for include, exclude in _EXCLUSIVE:
        if _value(source, include) and _value(source, exclude):
            reader.refuse(f"source.{exclude}", f"it does not stand beside {include}", "the include list alone decides")
    if source.filters_match_mode is MatchMode.REGEX:
        for list_name in _PATTERN_LISTS:
            _check_patterns(reader, list_name, _value(source, list_name))


def _check_patterns(reader: _Reader, list_name: str, entries: tuple[str, ...]) -> None:
    for entry in entries:
        try:
            pattern = patterns.regex(entry)
        except values.Refused as refused:
            reader.refuse(f"source.{list_name}", f"{refused.expected} is expected, found {entry}", refused.hint)
            continue
        if pattern.server_text is None and not list_name.startswith("snapshot"):
            reader.warnings.append(
                f"source.{list_name}: the server cannot be asked for {entry}; it sends every event, "
                "and the capture drops the others"
            )


def _check_fields(reader: _Reader, source: Source, name: str) -> None:
    for list_name in ("field.exclude.list", "field.renames"):
        for entry in _value(source, list_name):
            excluded, renamed = ([entry], []) if list_name == "field.exclude.list" else ([], [entry])
            try:
                field_filters.read(excluded, renamed)
            except values.Refused as refused:
                reader.refuse(f"source.{list_name}", refused.expected)


def _check_collections(reader: _Reader, source: Source, name: str) -> None:
    for entry in source.collection_include_list:
        if "." not in entry and patterns.literal(entry).text == entry:
            hint = f"{entry}.*" if source.filters_match_mode is MatchMode.LITERAL else rf"{entry}\..*"
            reader.refuse("source.collection.include.list", f"database.collection is expected, found {entry}", hint)


def _check_connection(reader: _Reader, source: Source, name: str) -> None:
    if source.mongodb_password is not None and source.mongodb_user is None:
        reader.refuse("source.mongodb.user", "it is expected beside mongodb.password")


def _check_capture(reader: _Reader, source: Source, name: str) -> None:
    target = source.capture_target
    match source.capture_scope:
        case CaptureScope.DATABASE if target is None or "." in target:
            reader.refuse("source.capture.target", "the name of a database is expected beside capture.scope: database")
        case CaptureScope.COLLECTION if target is None or "." not in target.strip("."):
            expected = "database.collection is expected beside capture.scope: collection"
            reader.refuse("source.capture.target", expected)
    if source.cursor_pipeline_order is PipelineOrder.USER_ONLY and source.cursor_pipeline is None:
        reader.refuse("source.cursor.pipeline", "it is expected beside cursor.pipeline.order: user_only")
    needs_description = not source.capture_mode.has_full_updates
    for problem in cursor_pipeline.problems(filters.user_stages(source), needs_description=needs_description):
        reader.refuse("source.cursor.pipeline", problem)
    skips = source.cursor_oversize_handling_mode is OversizeMode.SKIP
    if skips and source.cursor_oversize_skip_threshold == 0:
        reader.refuse("source.cursor.oversize.skip.threshold", "a size is expected beside the mode skip", "16777216")


def _check_modes(reader: _Reader, source: Source, name: str) -> None:
    if source.snapshot_mode is SnapshotMode.CUSTOM and source.snapshot_mode_custom_name is None:
        reader.refuse("source.snapshot.mode.custom.name", "an import path is expected beside snapshot.mode: custom")
    if source.topic_prefix is not None and name and source.topic_prefix != name:
        reader.refuse("source.topic.prefix", f"the pipeline's name is expected, {name}", "or leave it out")
    if source.errors_retry_delay_max_ms < source.errors_retry_delay_initial_ms:
        reader.refuse("source.errors.retry.delay.max.ms", "no less than errors.retry.delay.initial.ms is expected")


def _check_kafka(reader: _Reader, source: Source, name: str) -> None:
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


def _warn(reader: _Reader, source: Source, name: str) -> None:
    if source.max_queue_size_in_bytes < source.commit_max_bytes:
        reader.warnings.append("source.max.queue.size.in.bytes is below commit.max.bytes: no commit will be larger than it")
    if source.heartbeat_interval_ms == 0:
        reader.warnings.append(
            "source.heartbeat.interval.ms is 0: the position of a quiet stream is not committed, "
            "and may fall out of the oplog"
        )
    if not source.tombstones_on_delete:
        reader.warnings.append("source.tombstones.on.delete has no effect: tables need no tombstones")


_CHECKS: tuple[Callable[[_Reader, Source, str], None], ...] = (
    _check_connection,
    _check_lists,
    _check_fields,
    _check_collections,
    _check_capture,
    _check_modes,
    _check_kafka,
    _warn,
)


def _gold(reader: _Reader, found: object) -> Gold:
    keys = reader.keys("gold", found, _GOLD)
    return Gold(keys["models"], keys["expectations"], keys["delta.enableDeletionVectors"])


def _maintenance(reader: _Reader, found: object) -> Maintenance:
    read = reader.keys("maintenance", found, _MAINTENANCE)
    text = read["quiet.hours"]
    hours = None if text is None else _QUIET_HOURS.fullmatch(text)
    if text is not None and hours is None:
        reader.refuse("maintenance.quiet.hours", f"a time of day in UTC is expected, found {text}", '"02:00-05:00"')
    quiet = None
    if hours is not None:
        first, second, third, fourth = map(int, hours.groups())
        quiet = QuietHours(first * 60 + second, third * 60 + fourth)
    return Maintenance(read["ops.retention.days"], read["deletes.retention.days"], read["bronze.retention.days"], quiet)


def _silver(reader: _Reader, found: object, source: Source) -> Silver:
    section = reader.section("silver", found)
    reader.unknown("silver", section, ("defaults", "collections"))
    shared = reader.section("silver.defaults", section.get("defaults"))
    own = reader.section("silver.collections", section.get("collections"))
    defaults = _collection(reader, "silver.defaults", shared, {})
    collections = {
        namespace: _collection(
            reader,
            f"silver.collections.{namespace}",
            shared,
            reader.section(f"silver.collections.{namespace}", options),
        )
        for namespace, options in own.items()
    }
    _check_namespaces(reader, collections, source)
    return Silver(defaults, collections)


def _check_namespaces(reader: _Reader, namespaces: Mapping[str, object], source: Source) -> None:
    is_readable = not any(problem.path.startswith("source") for problem in reader.problems)
    captured = filters.of(source) if is_readable else filters.Filter()
    for namespace in namespaces:
        db, dot, collection = namespace.partition(".")
        if not (db and dot and collection):
            reader.refuse(f"silver.collections.{namespace}", "a collection, as database.collection, is expected")
        elif not captured.includes(db, collection):
            reader.warnings.append(f"silver.collections.{namespace}: the filters of source do not capture it")


def _collection(reader: _Reader, path: str, shared: Mapping[str, Any], own: Mapping[str, Any]) -> CollectionSettings:
    """One collection's settings: its own keys over the defaults; mistakes in the defaults are reported with
    them.
    """
    is_default = path == "silver.defaults"
    mine = shared if is_default else own
    merged = {**shared, **own}
    reader.unknown(path, mine, _COLLECTION_NAMES)
    quiet = _Reader()
    plain = {name: (reader if name in mine else quiet)._key(path, name, key, merged) for name, key in _COLLECTION.items()}
    schema = {**_pins(quiet, path, shared.get("schema")), **_pins(reader, path, mine.get("schema"))}
    return CollectionSettings(
        unwrap=_unwrap(reader, path, mine, merged),
        schema=schema,
        on_conflict=plain["schema.on.conflict"],
        history=plain["history"],
        keep_document=plain["keep.document"],
        map_fields=plain["map.fields"],
        max_batch_events=plain["max.batch.events"],
        on_drop=plain["collection.drop.handling.mode"],
        on_rename=plain["collection.rename.handling.mode"],
    )


def _unwrap(reader: _Reader, path: str, mine: Mapping[str, Any], merged: Mapping[str, Any]) -> unwrap_options.UnwrapOptions:
    options = {name: value for name, value in merged.items() if name in unwrap_options.NAMES and value is not None}
    written = {name: value for name, value in options.items() if name in mine}
    reader.warnings.extend(f"{path}.{ignored}" for ignored in unwrap_options.ignored(written))
    try:
        return unwrap_options.parse(options, where=path)
    except errors.SettingsError as error:
        own = (problem for problem in error.problems if problem.path.removeprefix(f"{path}.") in mine)
        reader.problems.extend(own)
        return unwrap_options.UnwrapOptions()


def _pins(reader: _Reader, path: str, found: object) -> dict[str, str]:
    """Pinned types as one spelling each; whether they are types at all is for the document schema to say."""
    section = reader.section(f"{path}.schema", found)
    pins = {name: _pin(reader, f"{path}.schema.{name}", text) for name, text in section.items()}
    try:
        parse_pins(pins, where=f"{path}.schema")
    except errors.SettingsError as error:
        reader.problems.extend(error.problems)
    return pins


def _pin(reader: _Reader, path: str, found: object) -> str:
    text = re.sub(r"\s+", "", str(reader.value(path, values.Text("a type such as decimal(18,2)"), found, "string")))
    return _TYPE_ALIASES.get(text.lower(), text.lower())


def _value(source: Source, name: str) -> Any:
    return getattr(source, properties.BY_NAME[name].attribute)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
