"""Which namespaces a pipeline captures: as a predicate, as stages for the server, and how wide a stream.

Debezium's rules: an entry matches the whole `db` or `db.coll`, in any case; an include list wins over an
exclude list; databases and collections must both be let in; `admin`, `config`, `local` and `system.*`
collections never are, for no change stream has them.

The stages let through at least what the predicate does, and the events without which a stream would go wrong:
`invalidate`, `dropDatabase`, a rename onto a captured collection (`$out` and `dropTarget` replace its whole
content with no other event), every change of a captured collection that is not a document's.
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
"""The operation types of documents."""


@dataclass(frozen=True)
class NameFilter:
    """An include and an exclude list over one kind of name; the include list wins."""

    include: tuple[Pattern, ...] = ()
    exclude: tuple[Pattern, ...] = ()

    def includes(self, name: str) -> bool:
        """Whether the lists let the name in; without lists everything is."""
        return self._is_meant(name) if self.include else not self._is_meant(name)

    @functools.cached_property
    def _is_meant(self) -> Callable[[str], bool]:
        return patterns.any_of(self.include or self.exclude)


@dataclass(frozen=True)
class Filter:
    """The lists of one pipeline; `signals` is the collection that is read for signals, captured or not.

    `target` is the database, or the database and the collection, of a narrower `capture.scope`: no event comes from
    elsewhere.
    """

    databases: NameFilter = NameFilter()
    collections: NameFilter = NameFilter()
    snapshots: NameFilter = NameFilter()
    signals: str | None = None
    target: tuple[str, ...] = ()

    @property
    def is_one_entry(self) -> bool:
        """Whether the lists name one thing of the whole deployment: that is found in the oplog in half of the time that it takes in events."""
        lists = (self.databases, self.collections)
        return not self.target and sum(len(each.include) + len(each.exclude) for each in lists) == 1

    def includes(self, db: str, collection: str) -> bool:
        """Whether events of this collection are captured."""
        if db in BUILT_IN or collection.startswith("system.") or not self._is_in_scope(db, collection):
            return False
        return self.databases.includes(db) and self.collections.includes(f"{db}.{collection}")

    def includes_database(self, db: str) -> bool:
        """Whether any collection of this database may be captured."""
        if db in BUILT_IN or not self._is_in_scope(db) or not self.databases.includes(db):
            return False
        return self._named_databases is None or patterns.folded(db) in self._named_databases

    @functools.cached_property
    def _named_databases(self) -> frozenset[str] | None:
        """The databases that the include list of collections names; None where it leaves them open."""
        pairs = [pattern.by_database() for pattern in self.collections.include]
        named = frozenset(patterns.folded(name) for pair in pairs for name, _ in pair or ())
        return None if not pairs or None in pairs else named

    def _is_in_scope(self, *names: str) -> bool:
        """Whether the stream carries events of a database, or of a collection in it."""
        at = min(len(names), len(self.target))
        return names[:at] == self.target[:at]

    def is_snapshotted(self, db: str, collection: str) -> bool:
        """Whether a snapshot reads this collection: captured, and let in by
        `snapshot.include.collection.list`.
        """
        return self.includes(db, collection) and self.snapshots.includes(f"{db}.{collection}")

    def is_signals(self, db: str, collection: str) -> bool:
        """Whether this is the collection that is read for signals."""
        return self.signals == f"{db}.{collection}"

    def named(self) -> tuple[tuple[str, str], ...]:
        """The collections that the include list names outright, as it writes them: they ought to exist."""
        pairs = itertools.chain.from_iterable(pattern.by_database() or () for pattern in self.collections.include)
        return tuple((db, collection.literal) for db, collection in pairs if collection.literal is not None)

    def left_to_client(self) -> tuple[str, ...]:
        """Entries that cannot be written for the server: it sends more events, which are dropped here."""
        lists = (
            self.databases.include,
            self.databases.exclude,
            self.collections.include,
            self.collections.exclude,
        )
        return tuple(each.text for each in itertools.chain(*lists) if each.server_text is None)


@dataclass(frozen=True)
class Scope:
    """What a change stream is opened on: a deployment, the database `db`, or the collection
    `db`.`collection`.
    """

    kind: CaptureScope
    db: str | None = None
    collection: str | None = None

    def __str__(self) -> str:
        return ".".join(filter(None, (self.db, self.collection))) or self.kind.value


def of(source: Source) -> Filter:
    """The filter of the settings; they were validated, so every entry is readable."""
    read = patterns.regex if source.filters_match_mode is MatchMode.REGEX else patterns.literal

    def names(include: Iterable[str], exclude: Iterable[str] = ()) -> NameFilter:
        return NameFilter(tuple(map(read, include)), tuple(map(read, exclude)))

    return Filter(
        databases=names(source.database_include_list, source.database_exclude_list),
        collections=names(source.collection_include_list, source.collection_exclude_list),
        snapshots=names(source.snapshot_include_collection_list),
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
    """The operation types of documents that are captured: all but `skipped.operations`."""
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
    """The `$match` that the server evaluates, for what the lists let in and what else is let in `besides`; no stage where everything is
    captured."""
    conditions: list[dict[str, Any]] = []
    skipped = sorted(OPERATIONS - set(operations))
    if skipped:
        taken: dict[str, Any] = {"operationType": {"$nin": skipped}}
        # A signal is an insert, and is to come whatever is skipped.
        conditions.append(taken if filter_.signals is None else {"$or": [taken, _namespace(filter_.signals, "ns")]})
    captured = _captured(filter_, "ns")
    if captured is not None:
        # A rename onto a captured collection replaces all of its documents, and is an event of the other namespace
        # alone.
        renamed = _captured(filter_, "to") or {}
        # A `$match` that swallows these ends the stream without a word: the cursor dies, with neither an event nor an
        # error.
        always = {"operationType": {"$in": ["invalidate", "dropDatabase"]}}
        conditions.append({"$or": [always, captured, {"operationType": "rename", **renamed}, *besides]})
    return [{"$match": _all(conditions)}] if conditions else []


def pipeline(source: Source) -> list[dict[str, Any]]:
    """Every stage of the change stream: filters and `cursor.pipeline` in their order, splitting last."""
    filter_ = of(source)
    besides = [] if filter_.is_one_entry else [_OF_EVENTS_ALONE]
    return _ordered(source, _as_sent(server_stages(filter_, operations=operations(source), besides=besides)))


def _ordered(source: Source, internal: list[dict[str, Any]]) -> list[dict[str, Any]]:
    user = cursor_pipeline.guarded(user_stages(source))
    split: list[dict[str, Any]] = (
        # Last, because the server allows it nowhere else: it divides what the other stages have left.
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
    """The stages of `cursor.pipeline` as the settings have them."""
    if source.cursor_pipeline is None:
        return []
    found: list[dict[str, Any]] = query.loads(source.cursor_pipeline)
    return found


def full_document(source: Source) -> str | None:
    """The stream's `fullDocument`; post-images `whenAvailable`, because a missing one must not end a stream."""
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
    """What to open the stream on: `capture.scope`, or without it one database where the include lists leave
    one.

    A database stream needs no more than `read` on it. `databases` are the names that the server knows: lists
    are blind to case and streams are not, so a name of theirs is preferred to the list's spelling.
    """
    match source.capture_scope:
        case CaptureScope.DEPLOYMENT:
            return Scope(CaptureScope.DEPLOYMENT)
        case CaptureScope.DATABASE:
            return Scope(CaptureScope.DATABASE, source.capture_target)
        case CaptureScope.COLLECTION:
            db, _, collection = (source.capture_target or "").partition(".")
            return Scope(CaptureScope.COLLECTION, db, collection)
        case None:
            return _narrowest(of(source), databases)


def fingerprint(source: Source) -> str:
    """32 hex digits that change with everything that decides which events a stream carries, and with nothing
    else; and behind them what the stream leaves out: operations, and what stages of `cursor.pipeline` do (`left_out`).

    A position belongs to a stream; after a change it is resumed by time and not by its token. The spelling of
    lists, their order, connections, bounds and what is done with an event afterwards do not count.
    """
    stream = {
        "scope": str(stream_scope(source)),
        # As the lists have it: what a server is to be told of letters is another thing in each version.
        "pipeline": _ordered(source, server_stages(of(source), operations=operations(source))),
        "fullDocument": full_document(source),
        "fullDocumentBeforeChange": full_document_before_change(source),
        # With it the server sends `disambiguatedPaths` (from 6.1 on), and a token is refused by a stream without it:
        # error 280.
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
    """Each stage that may leave events out, behind those that change what it sees of them, and each that leaves out a part of documents."""
    changing: list[dict[str, Any]] = []
    for each in stages:
        if CHANGING.issuperset(each):
            changing.append(each)
            if cursor_pipeline.leaves_out_fields(each):
                yield [each]
        else:
            yield [*changing, each]


def _named(stages: list[dict[str, Any]]) -> str:
    return f"stage_{digest(stages if len(stages) > 1 else stages[0])[:12]}"


def is_same_stream(fingerprint: str, other: str) -> bool:
    """Whether both are of one stream. What it leaves out is in its digest, too; earlier versions did not name it."""
    return fingerprint.split("-")[0] == other.split("-")[0]


def left_out(fingerprint: str) -> frozenset[str]:
    """What a stream of this fingerprint leaves out: operation types by `skipped.operations`, and what each stage of
    `cursor.pipeline` may, `stage_…`."""
    return frozenset(fingerprint.split("-")[1:])


def no_longer_left_out(before: str, source: Source) -> frozenset[str]:
    """What a stream of the fingerprint `before` leaves out, and that of the settings does not."""
    gone = left_out(before) - left_out(fingerprint(source))
    stages = user_stages(source)
    # An earlier version named each stage by itself, also those that leave nothing out: what is still set is not gone.
    if any(CHANGING.issuperset(each) and _named([each]) in left_out(before) for each in stages):
        gone -= {_named([each]) for each in stages}
    return gone


def digest(value: Any) -> str:
    """64 hex digits for a part of the settings, in whatever order its fields are."""
    return hashlib.sha256(json_util.dumps(value, sort_keys=True).encode()).hexdigest()


_OF_EVENTS_ALONE = {"medallionNoEvent": True}
"""Met by no event. The oplog has no such field: beside it the server looks for the lists in events, and not in the oplog as well, where MongoDB
6.0 compiles each regular expression anew for each entry (with 2,000 names it read 400 entries a second, and 40,000 so; with one, 50,000 and 25,000)."""

_REGEX_LIMIT = 16_000  # the server refuses regular expressions above 32764 bytes


def _captured(filter_: Filter, field: str) -> dict[str, Any] | None:
    """The condition on the namespace in `field` (`ns`, or the `to` of a rename); None where all namespaces
    pass.
    """
    conditions = [
        *_database_conditions(filter_.databases, field),
        *_collection_conditions(filter_.collections, field),
    ]
    if not conditions:
        return None
    # The collection of signals has to come through whether it is captured or not.
    if filter_.signals is None:
        return _all(conditions)
    return {"$or": [_all(conditions), _namespace(filter_.signals, field)]}


def _namespace(name: str, field: str) -> dict[str, Any]:
    """The condition that `field` is this `database.collection`."""
    db, _, collection = name.partition(".")
    return {f"{field}.db": db, f"{field}.coll": collection}


def _database_conditions(names: NameFilter, field: str) -> list[dict[str, Any]]:
    included = _server_texts(names.include)
    if included is not None:
        return [_matching(f"{field}.db", included)] if included else _excluded_databases(names, field)
    return []


def _excluded_databases(names: NameFilter, field: str) -> list[dict[str, Any]]:
    known = [text for pattern in names.exclude if (text := pattern.server_text) is not None]
    return [{"$nor": [_matching(f"{field}.db", known)]}] if known else []


def _collection_conditions(names: NameFilter, field: str) -> list[dict[str, Any]]:
    if names.include:
        return [_any(_namespace_clauses(names.include, field))] if _server_texts(names.include) is not None else []
    known = tuple(pattern for pattern in names.exclude if pattern.server_text is not None)
    return [{"$nor": _namespace_clauses(known, field)}] if known else []


def _namespace_clauses(entries: Sequence[Pattern], field: str) -> list[dict[str, Any]]:
    """One clause a database whose name is plain, which is compared first; one over all the others."""
    by_database: dict[str, list[str]] = {}
    others: list[str] = []
    for entry in entries:
        pairs = entry.by_database()
        if pairs is None:
            others.append(entry.server_text or "")
        for db, collection in pairs or ():
            by_database.setdefault(patterns.folded(db), []).append(collection.text)
    clauses = [
        {**_matching(f"{field}.db", [patterns.literal(db).text]), **_matching(f"{field}.coll", collections)}
        for db, collections in sorted(by_database.items())
    ]
    name = {"$concat": [f"${field}.db", ".", f"${field}.coll"]}
    whole = [{"$expr": {"$regexMatch": {"input": name, "regex": regex, "options": "i"}}} for regex in _anchored(others)]
    return [*clauses, *whole]


def _matching(field: str, texts: Sequence[str]) -> dict[str, Any]:
    regexes = [{"$regex": regex, "$options": "i"} for regex in _anchored(texts)]
    return {field: regexes[0]} if len(regexes) == 1 else {"$or": [{field: regex} for regex in regexes]}


def _anchored(texts: Iterable[str]) -> list[str]:
    """As few regular expressions as the server's limit allows, each over the whole name; sorted, so that
    order is none.
    """
    groups: list[list[str]] = []
    size = _REGEX_LIMIT
    for text in sorted(set(texts)):
        # In bytes, as the server counts them.
        length = len(patterns.as_sent(text).encode())
        size += length + 1
        if size > _REGEX_LIMIT:
            groups.append([])
            size = length
        groups[-1].append(text)
    # `\z` and not `$`, which also matches before a line's end that a name closes with.
    return [rf"^(?:{'|'.join(group)})\z" for group in groups]


def _as_sent(stages: Any) -> Any:
    """The stages as they are sent."""
    if isinstance(stages, list):
        return [_as_sent(each) for each in stages]
    if not isinstance(stages, dict):
        return stages
    return {
        name: patterns.as_sent(value) if name in ("$regex", "regex") else _as_sent(value) for name, value in stages.items()
    }


def _server_texts(entries: Iterable[Pattern]) -> list[str] | None:
    """The entries in the server's dialect; None where one of them is not certain, for then the list says
    nothing.
    """
    texts = [entry.server_text for entry in entries]
    return None if None in texts else [text for text in texts if text is not None]


def _all(conditions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return conditions[0] if len(conditions) == 1 else {"$and": list(conditions)}


def _any(conditions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return conditions[0] if len(conditions) == 1 else {"$or": list(conditions)}


def _narrowest(filter_: Filter, databases: Sequence[str]) -> Scope:
    written = _pinned_databases(filter_)
    if filter_.signals is not None:
        written = [*written, filter_.signals.partition(".")[0]] if written else []
    # A stream is on one database or on all of them.
    if len({patterns.folded(name) for name in written}) != 1:
        return Scope(CaptureScope.DEPLOYMENT)
    known = [name for name in databases if patterns.folded(name) == patterns.folded(written[0])]
    return Scope(CaptureScope.DATABASE, known[0] if len(known) == 1 else written[0])


def _pinned_databases(filter_: Filter) -> list[str]:
    """The databases to which the include lists confine a pipeline; empty where they leave them open."""
    names = [pattern.literal for pattern in filter_.databases.include]
    if names and None not in names:
        return [name for name in names if name is not None]
    pairs = [pattern.by_database() for pattern in filter_.collections.include]
    if not pairs or None in pairs:
        return []
    return [db for db, _ in itertools.chain.from_iterable(pair for pair in pairs if pair is not None)]


def _lists_of_the_client(source: Source) -> dict[str, Any]:
    """The lists as far as they are applied here and not by the server, whose stages then say nothing of them."""
    chosen = of(source)
    if source.cursor_pipeline_order is not PipelineOrder.USER_ONLY and not chosen.left_to_client():
        return {}
    names = (chosen.databases, chosen.collections)
    return {"lists": [sorted({each.text for each in side}) for one in names for side in (one.include, one.exclude)]}


def _skip_threshold(source: Source) -> int | None:
    skips = source.cursor_oversize_handling_mode is OversizeMode.SKIP
    return source.cursor_oversize_skip_threshold if skips else None
