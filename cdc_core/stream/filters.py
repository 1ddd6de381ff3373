"""The namespaces that a pipeline captures: as a predicate, as stages for the server, and as the scope of the stream.

Debezium's rules: an entry matches the whole `db` or `db.coll` and ignores case; an include list wins over an exclude
list; databases and collections must both be included. `admin`, `config`, `local` and `system.*` collections never are,
because change streams do not have them.

The stages let through at least what the predicate does, and also the events that a stream needs: `invalidate`,
`dropDatabase`, a rename onto a captured collection (`$out` and `dropTarget` replace its whole content without another
event), and every other event of a captured collection that is not about a document.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bson import json_util

from cdc_core.extended_json import query
from cdc_core.properties.source import (
    CaptureScope,
    FullUpdateType,
    MatchMode,
    Operation,
    OversizeMode,
    PipelineOrder,
    Source,
)
from cdc_core.stream import cursor_pipeline, patterns
from cdc_core.stream.patterns import Pattern

BUILT_IN = frozenset({"admin", "config", "local"})
"""Databases that are never captured."""

OPERATIONS = frozenset(cursor_pipeline.DOCUMENTS)
"""The operation types of events about documents."""


@dataclass(frozen=True)
class NameFilter:
    """An include and an exclude list over one kind of name; the include list wins."""

    include: tuple[Pattern, ...] = ()
    exclude: tuple[Pattern, ...] = ()

    def includes(self, name: str) -> bool:
        """Whether the lists include the name; without lists every name is included."""
        return self._is_meant(name) if self.include else not self._is_meant(name)

    @functools.cached_property
    def _is_meant(self) -> Callable[[str], bool]:
        return patterns.any_of(self.include or self.exclude)


@dataclass(frozen=True)
class Filter:
    """The lists of one pipeline; `signals` is the collection that is read for signals, captured or not.

    `target` is the database, or the database and the collection, of a narrower `capture.scope`.
    """

    databases: NameFilter = NameFilter()
    collections: NameFilter = NameFilter()
    snapshots: NameFilter = NameFilter()
    signals: str | None = None
    target: tuple[str, ...] = ()

    @property
    def is_one_entry(self) -> bool:
        """Whether the lists have one entry and the stream is of the deployment: then the server's search in the oplog is twice as fast."""
        lists = (self.databases, self.collections)
        return not self.target and sum(len(names.include) + len(names.exclude) for names in lists) == 1

    def includes(self, db: str, collection: str) -> bool:
        """Whether events of this collection are captured."""
        if db in BUILT_IN or collection.startswith("system.") or not self._is_in_scope(db, collection):
            return False
        return self.databases.includes(db) and self.collections.includes(f"{db}.{collection}")

    def includes_database(self, db: str) -> bool:
        """Whether a collection of this database may be captured."""
        if db in BUILT_IN or not self._is_in_scope(db) or not self.databases.includes(db):
            return False
        return self._named_databases is None or patterns.folded(db) in self._named_databases

    @functools.cached_property
    def _named_databases(self) -> frozenset[str] | None:
        """The databases that the include list of collections names; None if it does not determine them."""
        pairs = [pattern.by_database() for pattern in self.collections.include]
        databases = frozenset(patterns.folded(name) for pair in pairs for name, _ in pair or ())
        return None if not pairs or None in pairs else databases

    def _is_in_scope(self, *names: str) -> bool:
        """Whether the stream has events of a database, or of a collection in it."""
        depth = min(len(names), len(self.target))
        return names[:depth] == self.target[:depth]

    def is_snapshotted(self, db: str, collection: str) -> bool:
        """Whether a snapshot reads this collection: captured, and included by `snapshot.include.collection.list`."""
        return self.includes(db, collection) and self.snapshots.includes(f"{db}.{collection}")

    def is_signals(self, db: str, collection: str) -> bool:
        """Whether this is the collection that is read for signals."""
        return self.signals == f"{db}.{collection}"

    def named(self) -> tuple[tuple[str, str], ...]:
        """The collections that the include list names literally, as written; they are expected to exist."""
        pairs = itertools.chain.from_iterable(pattern.by_database() or () for pattern in self.collections.include)
        return tuple((db, collection.literal) for db, collection in pairs if collection.literal is not None)

    def left_to_client(self) -> tuple[str, ...]:
        """The entries that cannot be sent to the server: it sends more events, which are dropped here."""
        lists = (
            self.databases.include,
            self.databases.exclude,
            self.collections.include,
            self.collections.exclude,
        )
        return tuple(pattern.text for pattern in itertools.chain(*lists) if pattern.server_text is None)


@dataclass(frozen=True)
class Scope:
    """What a change stream is opened on: a deployment, the database `db`, or the collection `db`.`collection`."""

    kind: CaptureScope
    db: str | None = None
    collection: str | None = None

    def __str__(self) -> str:
        return ".".join(filter(None, (self.db, self.collection))) or self.kind.value


def of(source: Source) -> Filter:
    """The filter of validated settings."""
    pattern_of = patterns.regex if source.filters_match_mode is MatchMode.REGEX else patterns.literal

    def names(include: Iterable[str], exclude: Iterable[str] = ()) -> NameFilter:
        return NameFilter(tuple(map(pattern_of, include)), tuple(map(pattern_of, exclude)))

    return Filter(
        databases=names(source.database_include_list, source.database_exclude_list),
        collections=names(source.collection_include_list, source.collection_exclude_list),
        # As in Debezium, always regular expressions.
        snapshots=NameFilter(tuple(map(patterns.regex, source.snapshot_include_collection_list))),
        signals=source.signal_data_collection,
        target=_target(source),
    )


def _target(source: Source) -> tuple[str, ...]:
    target = source.capture_target or ""
    match source.capture_scope:
        case CaptureScope.DATABASE:
            return (target,)
        case CaptureScope.COLLECTION:
            db, _, collection = target.partition(".")
            return db, collection
        case CaptureScope.DEPLOYMENT | None:
            return ()


def operations(source: Source) -> frozenset[str]:
    """The captured operation types of documents: all except `skipped.operations`."""
    skipped: set[str] = set()
    for operation in source.skipped_operations:
        match operation:
            case Operation.CREATE:
                skipped |= {"insert"}
            case Operation.UPDATE:
                skipped |= {"update", "replace"}
            case Operation.DELETE:
                skipped |= {"delete"}
            case Operation.TRUNCATE | Operation.READ | Operation.NONE:
                pass
    return OPERATIONS - skipped


def server_stages(
    filter_: Filter, *, operations: Collection[str] = OPERATIONS, besides: Sequence[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """The `$match` that the server evaluates: what the lists include, or `besides`; no stage if everything is captured."""
    conditions: list[dict[str, Any]] = []
    skipped = sorted(OPERATIONS - set(operations))
    if skipped:
        operation: dict[str, Any] = {"operationType": {"$nin": skipped}}
        # A signal is an insert, and must pass whatever is skipped.
        conditions.append(operation if filter_.signals is None else {"$or": [operation, _namespace(filter_.signals, "ns")]})
    captured = _captured(filter_, "ns")
    if captured is not None:
        # A rename onto a captured collection replaces all of its documents, but its event is in the other namespace.
        rename_target = _captured(filter_, "to") or {}
        # Without these events the cursor would die silently, with neither an event nor an error.
        always = {"operationType": {"$in": ["invalidate", "dropDatabase"]}}
        conditions.append({"$or": [always, captured, {"operationType": "rename", **rename_target}, *besides]})
    return [{"$match": _all(conditions)}] if conditions else []


def pipeline(source: Source, *, is_over_events: bool = False) -> list[dict[str, Any]]:
    """All stages of the change stream: filters and `cursor.pipeline` in their order, splitting last.

    With `is_over_events` the server never evaluates the lists in its search of the oplog, where it fails at a name that is not UTF-8.
    """
    filter_ = of(source)
    besides = [] if filter_.is_one_entry and not is_over_events else [_OF_EVENTS_ALONE]
    return _ordered(source, _as_sent(server_stages(filter_, operations=operations(source), besides=besides)))


def _ordered(source: Source, internal: list[dict[str, Any]]) -> list[dict[str, Any]]:
    user = cursor_pipeline.guarded(user_stages(source))
    split: list[dict[str, Any]] = (
        # The server only accepts it as the last stage.
        [{"$changeStreamSplitLargeEvent": {}}] if source.cursor_oversize_handling_mode is OversizeMode.SPLIT else []
    )
    match source.cursor_pipeline_order:
        case PipelineOrder.INTERNAL_FIRST:
            return [*internal, *user, *split]
        case PipelineOrder.USER_FIRST:
            return [*user, *internal, *split]
        case PipelineOrder.USER_ONLY:
            return [*user, *split]


def user_stages(source: Source) -> list[dict[str, Any]]:
    """The stages of `cursor.pipeline`."""
    if source.cursor_pipeline is None:
        return []
    stages: list[dict[str, Any]] = query.loads(source.cursor_pipeline)
    return stages


def full_document(source: Source) -> str | None:
    """The stream's `fullDocument`; post-images are `whenAvailable`, because a missing one must not end the stream."""
    if not source.capture_mode.has_full_updates:
        return None
    match source.capture_mode_full_update_type:
        case FullUpdateType.LOOKUP:
            return "updateLookup"
        case FullUpdateType.POST_IMAGE:
            return "whenAvailable"


def full_document_before_change(source: Source) -> str | None:
    """The stream's `fullDocumentBeforeChange`."""
    return "whenAvailable" if source.capture_mode.has_pre_images else None


def stream_scope(source: Source, *, databases: Sequence[str] = ()) -> Scope:
    """What to open the stream on: `capture.scope`, by default one database if the include lists allow only one.

    A database stream only needs the `read` role on it. `databases` are the names on the server: lists ignore case and
    streams do not, so the server's spelling is preferred.
    """
    if source.capture_scope is None:
        return _narrowest(of(source), databases)
    return Scope(source.capture_scope, *_target(source))


def fingerprint(source: Source) -> str:
    """Identifies the stream: 32 hex digits, and what the stream leaves out (`left_out`).

    The digits change with every setting that decides which events the stream carries. A position belongs to a stream:
    after a change it is resumed by time and not by its token. Order and repetition in lists, connections, bounds, and
    what is done with events afterwards do not count. Behind the digits are the skipped operations and the stages of
    `cursor.pipeline`, joined by `-`.
    """
    stream = {
        "scope": str(stream_scope(source)),
        # Not as sent (`patterns.as_sent`), which depends on the version of Unicode.
        "pipeline": _ordered(source, server_stages(of(source), operations=operations(source))),
        "fullDocument": full_document(source),
        "fullDocumentBeforeChange": full_document_before_change(source),
        # The server sends `disambiguatedPaths` (from 6.1), and refuses the token in a stream without it (error 280).
        "showExpandedEvents": True,
        "skip": _skip_threshold(source),
        **_lists_of_the_client(source),
    }
    has_stages = source.cursor_pipeline_order is not PipelineOrder.USER_ONLY
    skipped = sorted(OPERATIONS - operations(source)) if has_stages else []
    return "-".join((digest(stream)[:32], *skipped, *map(_named, _leaving_out(user_stages(source)))))


CHANGING = frozenset({"$addFields", "$project", "$replaceRoot", "$replaceWith", "$set", "$unset"})
"""Stages that leave no event out."""


def _leaving_out(stages: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Each stage that may leave events out, after those that change what it matches, and each that removes fields of documents."""
    changing: list[dict[str, Any]] = []
    for stage in stages:
        if CHANGING.issuperset(stage):
            changing.append(stage)
            if cursor_pipeline.leaves_out_fields(stage):
                yield [stage]
        else:
            yield [*changing, stage]


def _named(stages: list[dict[str, Any]]) -> str:
    return f"stage_{digest(stages if len(stages) > 1 else stages[0])[:12]}"


def is_same_stream(fingerprint: str, other: str) -> bool:
    """Whether both are of one stream: the digits alone decide."""
    return fingerprint.split("-")[0] == other.split("-")[0]


def left_out(fingerprint: str) -> frozenset[str]:
    """What a stream leaves out: operation types of `skipped.operations`, and stages of `cursor.pipeline` as `stage_<digest>`."""
    return frozenset(fingerprint.split("-")[1:])


def no_longer_left_out(before: str, source: Source) -> frozenset[str]:
    """What a stream of the fingerprint `before` leaves out and that of the settings does not."""
    differences = left_out(before) - left_out(fingerprint(source))
    stages = user_stages(source)
    # Fingerprints of earlier versions name each stage by itself, also those that leave nothing out.
    if any(CHANGING.issuperset(stage) and _named([stage]) in left_out(before) for stage in stages):
        differences -= {_named([stage]) for stage in stages}
    return differences


def digest(value: Any) -> str:
    """64 hex digits of a part of the settings, independent of the order of fields."""
    return hashlib.sha256(json_util.dumps(value, sort_keys=True).encode()).hexdigest()


_OF_EVENTS_ALONE = {"medallionNoEvent": True}
"""Matches no event. The oplog lacks this field, so the server evaluates the lists only over events, and not over the oplog too.

There MongoDB 6.0 compiles each regular expression for every entry: with 2,000 names it reads 400 entries a second
instead of 40,000 (with one name 50,000 instead of 25,000).
"""

_REGEX_LIMIT = 16_000  # the server refuses regular expressions above 32764 bytes


def _captured(filter_: Filter, field: str) -> dict[str, Any] | None:
    """The condition on the namespace in `field` (`ns`, or the `to` of a rename); None if all namespaces pass."""
    conditions = [
        *_database_conditions(filter_.databases, field),
        *_collection_conditions(filter_.collections, field),
    ]
    if not conditions:
        return None
    # The collection of signals must pass, captured or not.
    if filter_.signals is None:
        return _all(conditions)
    return {"$or": [_all(conditions), _namespace(filter_.signals, field)]}


def _namespace(name: str, field: str) -> dict[str, Any]:
    """The condition that `field` is this `database.collection`."""
    db, _, collection = name.partition(".")
    return {f"{field}.db": db, f"{field}.coll": collection}


def _database_conditions(names: NameFilter, field: str) -> list[dict[str, Any]]:
    texts = _server_texts(names.include)
    if texts is not None:
        return [_matching(f"{field}.db", texts)] if texts else _excluded_databases(names, field)
    return []


def _excluded_databases(names: NameFilter, field: str) -> list[dict[str, Any]]:
    texts = [text for pattern in names.exclude if (text := pattern.server_text) is not None]
    return [{"$nor": [_matching(f"{field}.db", texts)]}] if texts else []


def _collection_conditions(names: NameFilter, field: str) -> list[dict[str, Any]]:
    if names.include:
        return [_any(_namespace_clauses(names.include, field))] if _server_texts(names.include) is not None else []
    portable = tuple(pattern for pattern in names.exclude if pattern.server_text is not None)
    return [{"$nor": _namespace_clauses(portable, field)}] if portable else []


def _namespace_clauses(entries: Sequence[Pattern], field: str) -> list[dict[str, Any]]:
    """One clause for each plain database name, which is compared first, and one for all other entries."""
    by_database: dict[str, list[str]] = {}
    other_texts: list[str] = []
    for entry in entries:
        pairs = entry.by_database()
        if pairs is None:
            other_texts.append(entry.server_text or "")
        for db, collection in pairs or ():
            by_database.setdefault(patterns.folded(db), []).append(collection.text)
    clauses = [
        {**_matching(f"{field}.db", [patterns.literal(db).text]), **_matching(f"{field}.coll", collections)}
        for db, collections in sorted(by_database.items())
    ]
    name = {"$concat": [f"${field}.db", ".", f"${field}.coll"]}
    name_clauses = [
        {"$expr": {"$regexMatch": {"input": name, "regex": regex, "options": "i"}}} for regex in _anchored(other_texts)
    ]
    return [*clauses, *name_clauses]


def _matching(field: str, texts: Sequence[str]) -> dict[str, Any]:
    regexes = [{"$regex": regex, "$options": "i"} for regex in _anchored(texts)]
    return {field: regexes[0]} if len(regexes) == 1 else {"$or": [{field: regex} for regex in regexes]}


def _anchored(texts: Iterable[str]) -> list[str]:
    """Sorted regular expressions over the whole name, as few as the server's limit of their size allows."""
    groups: list[list[str]] = []
    size = _REGEX_LIMIT
    for text in sorted(set(texts)):
        # The server limits bytes, not characters.
        length = len(patterns.as_sent(text).encode())
        size += length + 1
        if size > _REGEX_LIMIT:
            groups.append([])
            size = length
        groups[-1].append(text)
    # `\z` and not `$`, which also matches before a final newline.
    return [rf"^(?:{'|'.join(group)})\z" for group in groups]


def _as_sent(stages: Any) -> Any:
    """The stages as they are sent to the server."""
    if isinstance(stages, list):
        return [_as_sent(stage) for stage in stages]
    if not isinstance(stages, dict):
        return stages
    sent = {
        name: patterns.as_sent(value) if name in ("$regex", "regex") else _as_sent(value) for name, value in stages.items()
    }
    if "$expr" not in stages:
        return sent
    # `$regexMatch` fails at a name that is not UTF-8, where `$regex` matches nothing.
    names = [part[1:] for part in stages["$expr"]["$regexMatch"]["input"]["$concat"] if part.startswith("$")]
    return {**{name: {"$regex": "^"} for name in names}, **sent}


def _server_texts(entries: Iterable[Pattern]) -> list[str] | None:
    """The entries in the server's dialect; None if one of them is uncertain, because then the list cannot be evaluated there."""
    texts = [entry.server_text for entry in entries]
    return None if None in texts else [text for text in texts if text is not None]


def _all(conditions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return conditions[0] if len(conditions) == 1 else {"$and": list(conditions)}


def _any(conditions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return conditions[0] if len(conditions) == 1 else {"$or": list(conditions)}


def _narrowest(filter_: Filter, databases: Sequence[str]) -> Scope:
    names = _pinned_databases(filter_)
    if filter_.signals is not None:
        names = [*names, filter_.signals.partition(".")[0]] if names else []
    # A stream can be on one database or on all of them.
    if len({patterns.folded(name) for name in names}) != 1:
        return Scope(CaptureScope.DEPLOYMENT)
    matches = [name for name in databases if patterns.folded(name) == patterns.folded(names[0])]
    return Scope(CaptureScope.DATABASE, matches[0] if len(matches) == 1 else names[0])


def _pinned_databases(filter_: Filter) -> list[str]:
    """The databases to which the include lists are limited; empty if they do not determine them."""
    names = [pattern.literal for pattern in filter_.databases.include]
    if names and None not in names:
        return [name for name in names if name is not None]
    pairs = [pattern.by_database() for pattern in filter_.collections.include]
    if not pairs or None in pairs:
        return []
    return [db for db, _ in itertools.chain.from_iterable(pair for pair in pairs if pair is not None)]


def _lists_of_the_client(source: Source) -> dict[str, Any]:
    """The lists that are applied here and not by the server, whose stages then do not show them."""
    filter_ = of(source)
    if source.cursor_pipeline_order is not PipelineOrder.USER_ONLY and not filter_.left_to_client():
        return {}
    names = (filter_.databases, filter_.collections)
    return {
        "lists": [
            sorted({pattern.text for pattern in entries})
            for name_filter in names
            for entries in (name_filter.include, name_filter.exclude)
        ]
    }


def _skip_threshold(source: Source) -> int | None:
    skips = source.cursor_oversize_handling_mode is OversizeMode.SKIP
    return source.cursor_oversize_skip_threshold if skips else None
