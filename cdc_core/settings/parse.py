"""The settings of one pipeline: validated, frozen, and without secrets.

`parse` reads a whole document (from YAML or JSON) and reports all mistakes at once. References such as ``${env:NAME}``
stay references: `pipelines.settings.secrets` resolves them when they are needed.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cdc_core import errors
from cdc_core.properties import types as values
from cdc_core.properties import unwrap as unwrap_options
from cdc_core.properties.source import Source
from cdc_core.schema.pins import Pins, parse_pins, without_effect
from cdc_core.settings.section_reader import SectionKey, SectionReader
from cdc_core.settings.source_section import read_source
from cdc_core.stream import filters
from cdc_core.tables import layout as tables


class OnConflict(enum.Enum):
    """`schema.on.conflict`: what happens to a value that its column can neither hold nor be widened to."""

    RESCUE = "rescue"
    RETYPE = "retype"


class OnGone(enum.Enum):
    """`collection.drop.handling.mode` and `collection.rename.handling.mode`: what happens to the rows of a collection
    whose documents are gone.
    """

    DELETE = "delete"
    KEEP = "keep"


@dataclass(frozen=True)
class Lakehouse:
    """Where the tables are: below `root`, or in `catalog` as ``<schema_prefix><layer>.<table>``.

    `single_driver` declares that only one driver writes them, for stores that cannot exclude a second one. `store` has
    Hadoop's settings of the root's file system, with credentials as references.
    """

    root: str | None = None
    catalog: str | None = None
    schema_prefix: str = ""
    single_driver: bool = False
    store: Mapping[str, values.Reference] = field(default_factory=dict)


@dataclass(frozen=True)
class CollectionSettings:
    """How silver treats one collection.

    `schema` pins columns: dotted path to Spark type. `keep_document` is None if the capture mode decides.
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

    @functools.cached_property
    def pins(self) -> Pins:
        """The pinned columns; `schema` takes precedence over `map.fields`."""
        return parse_pins({**dict.fromkeys(self.map_fields, "map"), **self.schema})


@dataclass(frozen=True)
class SilverSettings:
    """Settings by collection; a collection without its own has the defaults."""

    defaults: CollectionSettings = CollectionSettings()
    collections: Mapping[str, CollectionSettings] = field(default_factory=dict)

    def for_collection(self, namespace: str) -> CollectionSettings:
        """The settings of `database.collection`."""
        return self.collections.get(namespace, self.defaults)


@dataclass(frozen=True)
class GoldSettings:
    """The folders of SQL models and of expectations; None for none.

    `deletion_vectors` None: new tables have them, existing tables stay as they are.
    """

    models: str | None = None
    expectations: str | None = None
    deletion_vectors: bool | None = None


@dataclass(frozen=True)
class QuietHours:
    """A part of the day, in minutes since midnight UTC; it may span midnight."""

    begin: int
    end: int

    def holds(self, minute: int) -> bool:
        """Whether a minute of the day is in it."""
        if self.begin <= self.end:
            return self.begin <= minute < self.end
        return minute >= self.begin or minute < self.end


@dataclass(frozen=True)
class MaintenanceSettings:
    """How many days derived data is kept (None: forever), and when `run` maintains tables by itself."""

    ops_retention_days: int = 90
    deletes_retention_days: int = 90
    bronze_retention_days: int | None = None
    quiet_hours: QuietHours | None = None


@dataclass(frozen=True)
class Settings:
    """A whole settings file; printing it reveals no secret."""

    name: str
    lakehouse: Lakehouse
    source: Source
    silver: SilverSettings = SilverSettings()
    gold: GoldSettings = GoldSettings()
    maintenance: MaintenanceSettings = MaintenanceSettings()
    warnings: tuple[str, ...] = ()

    def keeps_document(self, namespace: str, *, has_waiting: Callable[[], bool] = lambda: False) -> bool:
        """Whether a collection's table keeps whole documents: if the settings say so, or the capture mode needs them.

        `has_waiting` returns whether updates from an earlier capture mode still need folding.
        """
        # Without full updates an event has no document: the table must have one to fold it onto.
        keep_document = self.silver.for_collection(namespace).keep_document
        if keep_document is not None:
            return keep_document
        return not self.source.capture_mode.has_full_updates or has_waiting()


def parse(document: object, *, where: str = "") -> Settings:
    """The settings in `document`; `where` names it in messages.

    Raises `SettingsError` with all mistakes: path of the key, what was expected, and the nearest name.
    """
    if not isinstance(document, Mapping):
        expected = "a mapping with the keys name, lakehouse and source"
        raise errors.SettingsError(errors.Problem(where, f"{expected} is expected, found {values.kind(document)}"))
    reader = SectionReader()
    settings = _settings(reader, document)
    if reader.problems:
        raise errors.SettingsError(reader.problems)
    return dataclasses.replace(settings, warnings=tuple(reader.warnings))


_SECTIONS = ("name", "lakehouse", "source", "silver", "gold", "maintenance")
_LAKEHOUSE: Mapping[str, SectionKey] = {
    "root": SectionKey(values.Location("a folder or a URL"), None),
    "catalog": SectionKey(values.Location("the name of a catalog"), None),
    "schema_prefix": SectionKey(values.Location("a prefix for schemas"), ""),
    "single_driver": SectionKey(values.Boolean(), False),
}
_CREDENTIAL = re.compile(
    r"(?!.*\.(?:provider(?:\.type)?|binding)$).*(?:secret|password|token|\.sas\b|\.key\b)", re.IGNORECASE
)
"""The names of options that hold a credential, and not the name of a class that gets one."""
_GOLD: Mapping[str, SectionKey] = {
    "models": SectionKey(values.Text("a folder"), None),
    "expectations": SectionKey(values.Text("a folder"), None),
    "delta.enableDeletionVectors": SectionKey(values.Boolean(), None),
}
_DAYS = values.Integer(1, 10**9)
"""In milliseconds they are a number of 64 bits, as SQL compares times."""
_MAINTENANCE: Mapping[str, SectionKey] = {
    "ops.retention.days": SectionKey(_DAYS, 90),
    "deletes.retention.days": SectionKey(_DAYS, 90),
    "bronze.retention.days": SectionKey(_DAYS, None),
    "quiet.hours": SectionKey(values.Text("a time of day in UTC such as 02:00-05:00"), None),
}
_QUIET_HOURS = re.compile(r"([01]\d|2[0-3]):([0-5]\d)\s*-\s*([01]\d|2[0-3]):([0-5]\d)")
_COLLECTION: Mapping[str, SectionKey] = {
    "schema.on.conflict": SectionKey(values.Choice(OnConflict), OnConflict.RESCUE),
    "history": SectionKey(values.Boolean(), False),
    "keep.document": SectionKey(values.Boolean(), None),
    "map.fields": SectionKey(values.NameList("a comma-separated list of dotted paths"), ()),
    "max.batch.events": SectionKey(values.Integer(1), 500_000),
    "collection.drop.handling.mode": SectionKey(values.Choice(OnGone), OnGone.DELETE),
    "collection.rename.handling.mode": SectionKey(values.Choice(OnGone), OnGone.DELETE),
}
_COLLECTION_NAMES = ("schema", *_COLLECTION, *unwrap_options.NAMES)
_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")
_TYPE_ALIASES = {"integer": "int", "long": "bigint"}


def _settings(reader: SectionReader, document: Mapping[Any, Any]) -> Settings:
    sections = reader.section("", document)
    reader.unknown("", sections, _SECTIONS)
    name = _name(reader, sections)
    source = read_source(reader, sections, name)
    return Settings(
        name=name,
        lakehouse=_lakehouse(reader, sections),
        source=source,
        silver=_silver(reader, sections.get("silver"), source),
        gold=_gold(reader, sections.get("gold")),
        maintenance=_maintenance(reader, sections.get("maintenance")),
    )


def _name(reader: SectionReader, sections: Mapping[str, Any]) -> str:
    value = sections.get("name")
    if value is None:
        reader.refuse("name", "a name for the pipeline is expected", "a pasted connector has it as topic.prefix")
        return ""
    name: str = reader.value("name", values.Text(), value, "")
    if name and not _NAME.fullmatch(name):
        valid_name = re.sub(r"[^A-Za-z0-9_-]", "_", name)[:100]
        reader.refuse(
            "name", "up to 100 letters, digits, _ and - are expected, as it names tables", f"for example {valid_name}"
        )
    return name


def _lakehouse(reader: SectionReader, sections: Mapping[str, Any]) -> Lakehouse:
    lakehouse_section = sections.get("lakehouse")
    if lakehouse_section is None:
        reader.refuse("lakehouse", "root or catalog is expected", "root: ./lakehouse")
        return Lakehouse()
    problem_count = len(reader.problems)
    section = dict(reader.section("lakehouse", lakehouse_section))
    store = _store(reader, section.pop("store", None))
    if section.get("schema_prefix") == "":  # the default
        del section["schema_prefix"]
    lakehouse = Lakehouse(**reader.keys("lakehouse", section, _LAKEHOUSE), store=store)
    if len(reader.problems) == problem_count:
        _check_lakehouse(reader, lakehouse)
    return lakehouse


def _store(reader: SectionReader, content: object) -> dict[str, values.Reference]:
    """Hadoop's settings of a file system; possible credentials must be references."""
    store: dict[str, values.Reference] = {}
    for name, value in reader.section("lakehouse.store", content).items():
        path = f"lakehouse.store.{name}"
        if not name.startswith("fs."):
            reader.refuse(path, "a setting of Hadoop's file systems is expected", "fs.s3a.endpoint, for example")
            continue
        text = values.written(value) if isinstance(value, (bool, int)) else value
        type_ = values.Secret() if _CREDENTIAL.match(name) else values.Referable()
        store[name] = reader.value(path, type_, text, values.Reference(""))
    return store


def _check_lakehouse(reader: SectionReader, lakehouse: Lakehouse) -> None:
    if (lakehouse.root is None) == (lakehouse.catalog is None):
        reader.refuse("lakehouse", "either root or catalog is expected", "a folder's path, or the name of a catalog")
    if lakehouse.store and lakehouse.root is None:
        reader.refuse("lakehouse.store", "it stands beside root only", "a catalog knows its own stores")
    if lakehouse.schema_prefix and lakehouse.catalog is None:
        reader.refuse("lakehouse.schema_prefix", "it stands beside catalog only")
    if not tables.SCHEMA_PREFIX.fullmatch(values.without_references(lakehouse.schema_prefix)):
        reader.refuse("lakehouse.schema_prefix", "letters, digits and _ are expected")


def _gold(reader: SectionReader, content: object) -> GoldSettings:
    keys = reader.keys("gold", content, _GOLD)
    return GoldSettings(keys["models"], keys["expectations"], keys["delta.enableDeletionVectors"])


def _maintenance(reader: SectionReader, content: object) -> MaintenanceSettings:
    options = reader.keys("maintenance", content, _MAINTENANCE)
    text = options["quiet.hours"]
    hours = None if text is None else _QUIET_HOURS.fullmatch(text)
    if text is not None and hours is None:
        reader.refuse("maintenance.quiet.hours", f"a time of day in UTC is expected, found {text}", '"02:00-05:00"')
    quiet_hours = None
    if hours is not None:
        first, second, third, fourth = map(int, hours.groups())
        quiet_hours = QuietHours(first * 60 + second, third * 60 + fourth)
        if quiet_hours.begin == quiet_hours.end:  # the range would be empty, so nothing would be maintained
            reader.refuse("maintenance.quiet.hours", f"two times of day are expected, found {text}", '"00:00-23:59"')
    return MaintenanceSettings(
        options["ops.retention.days"], options["deletes.retention.days"], options["bronze.retention.days"], quiet_hours
    )


def _silver(reader: SectionReader, content: object, source: Source) -> SilverSettings:
    section = reader.section("silver", content)
    reader.unknown("silver", section, ("defaults", "collections"))
    default_section = reader.section("silver.defaults", section.get("defaults"))
    collection_sections = reader.section("silver.collections", section.get("collections"))
    defaults = _collection(reader, "silver.defaults", default_section, {})
    own_sections = {
        namespace: reader.section(f"silver.collections.{namespace}", options)
        for namespace, options in collection_sections.items()
    }
    collections = {
        namespace: _collection(reader, f"silver.collections.{namespace}", default_section, own_section)
        for namespace, own_section in own_sections.items()
    }
    _check_namespaces(reader, collections, source)
    has_partial_updates = not source.capture_mode.has_full_updates
    written = {
        f"silver.collections.{namespace}": collections[namespace]
        for namespace, own_section in own_sections.items()
        if {"keep.document", "history"} & own_section.keys()
    }
    for path, collection in {"silver.defaults": defaults, **written}.items():
        if collection.keep_document is False and has_partial_updates:
            updates = f"updates of capture.mode: {source.capture_mode.value}"
            reader.warnings.append(
                f"{path}.keep.document: {updates} are not applied without it, and make their rows incomplete"
            )
    if not source.tombstones_on_delete:
        _warn_of_missing_tombstones(reader, defaults, collections)
    return SilverSettings(defaults, collections)


_WITHOUT_TOMBSTONES: Mapping[unwrap_options.DeleteMode, str] = {
    unwrap_options.DeleteMode.REWRITE_WITH_TOMBSTONE: unwrap_options.DeleteMode.REWRITE.value,
    unwrap_options.DeleteMode.OLDER_DROP_WITH_TOMBSTONE: unwrap_options.DeleteMode.DROP.value,
}
"""Modes whose tombstone removes the row, and what they are for a connector that sends none."""


def _warn_of_missing_tombstones(
    reader: SectionReader, defaults: CollectionSettings, collections: Mapping[str, CollectionSettings]
) -> None:
    """Warn of rows that a delete removes, and that would stay with a connector that sends no tombstones."""
    default_mode = defaults.unwrap.delete_tombstone_handling_mode
    modes = {f"silver.collections.{name}": each.unwrap.delete_tombstone_handling_mode for name, each in collections.items()}
    own_modes = {path: mode for path, mode in modes.items() if mode is not default_mode}
    for path, mode in {"silver.defaults": default_mode, **own_modes}.items():
        if mode in _WITHOUT_TOMBSTONES:
            reader.warnings.append(
                f"{path}: a delete removes the row, also beside source.tombstones.on.delete: false "
                f"(delete.tombstone.handling.mode: {_WITHOUT_TOMBSTONES[mode]} keeps it)"
            )


def _check_namespaces(reader: SectionReader, namespaces: Mapping[str, object], source: Source) -> None:
    # With a mistake in the filters it is unknown what they capture: one mistake gives one message.
    is_readable = not any(problem.path.startswith("source") for problem in reader.problems)
    filter_ = filters.of(source) if is_readable else filters.Filter()
    for namespace in namespaces:
        try:
            values.CollectionName("a collection, as database.collection,").read(namespace)
        except values.InvalidValue as error:
            reader.refuse(f"silver.collections.{namespace}", f"{error.expected} is expected", error.hint)
            continue
        db, _, collection = namespace.partition(".")
        if not filter_.includes(db, collection):
            reader.warnings.append(f"silver.collections.{namespace}: the filters of source do not capture it")


def _collection(reader: SectionReader, path: str, shared: Mapping[str, Any], own: Mapping[str, Any]) -> CollectionSettings:
    """One collection's settings: its own keys, else the defaults; mistakes in the defaults are only reported there."""
    is_default = path == "silver.defaults"
    written = shared if is_default else own
    reader.unknown(path, written, _COLLECTION_NAMES)
    # A key without a value is not set, and does not hide an inherited one; of `keep.document` it is a value: what the capture mode needs.
    section = {name: value for name, value in written.items() if value is not None or name == "keep.document"}
    merged = {**shared, **section}
    # Mistakes in inherited values are reported with the defaults, so this reader's are dropped.
    silent_reader = SectionReader()
    options = {
        name: (reader if name in section else silent_reader).key(path, name, key, merged)
        for name, key in _COLLECTION.items()
    }
    maps = dict.fromkeys(options["map.fields"], "map")
    own_maps = maps if "map.fields" in section else {}
    own_pins = _pins(reader, path, section.get("schema"), maps=own_maps)
    shared_pins = {} if is_default else _pins(silent_reader, path, shared.get("schema"))
    # An inherited pin yields to one of the collection that contradicts it.
    contradictory = _contradictory({**maps, **shared_pins, **own_pins}) - own_pins.keys() - own_maps.keys()
    return CollectionSettings(
        unwrap=_unwrap(reader, path, section, merged),
        schema={name: type_ for name, type_ in {**shared_pins, **own_pins}.items() if name not in contradictory},
        on_conflict=options["schema.on.conflict"],
        history=options["history"],
        keep_document=options["keep.document"],
        map_fields=tuple(name for name in maps if name not in contradictory),
        max_batch_events=options["max.batch.events"],
        on_drop=options["collection.drop.handling.mode"],
        on_rename=options["collection.rename.handling.mode"],
    )


def _unwrap(
    reader: SectionReader, path: str, mine: Mapping[str, Any], merged: Mapping[str, Any]
) -> unwrap_options.UnwrapOptions:
    options = {name: value for name, value in merged.items() if name in unwrap_options.NAMES and value is not None}
    set_options = {name: value for name, value in options.items() if name in mine}
    for name, older_names in unwrap_options.OLDER.items():
        if name not in set_options and not set_options.keys().isdisjoint(older_names):
            options.pop(name, None)  # the inherited option yields to the collection's older one
    reader.warnings.extend(f"{path}.{ignored}" for ignored in unwrap_options.ignored(set_options))
    try:
        return unwrap_options.parse(options, where=path)
    except errors.SettingsError as error:
        relevant = (problem for problem in error.problems if problem.path.removeprefix(f"{path}.") in mine)
        reader.problems.extend(relevant)
        return unwrap_options.UnwrapOptions()


def _pins(reader: SectionReader, path: str, content: object, *, maps: Mapping[str, str] | None = None) -> dict[str, str]:
    """Pinned types in one spelling, none if one is invalid; `maps` are those of `map.fields` in the same section."""
    section = reader.section(f"{path}.schema", content)
    pins = {name: _pin(reader, f"{path}.schema.{name}", text) for name, text in section.items()}
    try:
        parse_pins(pins, where=f"{path}.schema")
    except errors.SettingsError as error:
        reader.problems.extend(error.problems)
        return {}
    all_pins = {**(maps or {}), **pins}
    for below, above in without_effect(parse_pins(all_pins)):
        where = f"{path}.schema.{below}" if below in pins else f"{path}.map.fields"
        hint = (
            f"remove one of them, or pin the map's values, as {above}.*"
            if all_pins[above] == "map"
            else "remove one of them"
        )
        reader.refuse(where, f"{below} cannot be pinned, because {above} is pinned to {all_pins[above]}", hint)
    return pins


def _contradictory(pins: Mapping[str, str]) -> set[str]:
    """The pins that contradict each other."""
    return {name for pair in without_effect(parse_pins(pins)) for name in pair}


def _pin(reader: SectionReader, path: str, content: object) -> str:
    text = re.sub(r"\s+", "", str(reader.value(path, values.Text("a type such as decimal(18,2)"), content, "string")))
    return _TYPE_ALIASES.get(text.lower(), text.lower())
