"""The quarantine tables: events that silver cannot read, listed, and brought back through bronze.

    parted    a range's events without those that cannot be read; these are noted first
    listed    what is in a collection's quarantine, and what became of it
    replay    events that can be read now, appended to bronze again with their own place in the order

Silver appends facts before it applies the range that they are of. A range that is applied again appends them
again, which changes nothing: the newest fact of an event counts.
"""

from __future__ import annotations

import dataclasses
import json
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

import orjson
import pyarrow as pa
from pyspark.sql import functions as F

from cdc_core import errors
from cdc_core.bronze import columns as bronze
from cdc_core.silver import quarantine, reduce
from cdc_core.tables import layout as tables
from pipelines.bronze import collections as registry
from pipelines.bronze import log as bronze_table
from pipelines.delta import live_files, local_log, query_execution, table_errors
from pipelines.delta import tables as delta

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from cdc_core.settings.parse import Settings

PROPERTIES = {"delta.enableDeletionVectors": "false", "delta.checkpointInterval": "50"}

MANY_FACTS = 20_000
"""Of more facts a query says which events they hold."""

FEW = 1000
"""At most so many keys are named in a query; with more of them all events of a range are looked at."""

CORRECTABLE = ("before", "after", "updatedFields", "disambiguatedPaths")
"""The texts of an event that a replay may bring anew."""


class EventState(str, Enum):
    """What became of an event."""

    HELD = "held"
    ENDED = "ended"


@dataclass(frozen=True)
class QuarantinedEvent:
    """One event of a quarantine: what it is, why it is there, and whether it still is.

    `texts` are its documents by the names of `CORRECTABLE`; None where `with_texts` was not set.
    """

    collection: str
    resume_token: str
    kind: str
    op: str | None
    key: str | None
    sequence: str | None
    batch: int
    reason: str
    state: EventState
    texts: Mapping[str, str] | None = None


@dataclass(frozen=True)
class ReplayResult:
    """Events that bronze holds again, in one batch; None where there was nothing to bring back.

    `held` counts those that stay where they are: they still cannot be read, or follow one that cannot.
    """

    events: int
    batch: int | None
    held: int = 0


def parted(
    spark: SparkSession, table: tables.TableRef, *, events: DataFrame, span: reduce.Range, has_suspects: bool
) -> DataFrame | None:
    """The events of `span` as silver may apply them; None where they are as they are, as nearly always.

    `has_suspects` says whether `quarantine.is_suspect` holds for any of them. Facts are appended to `table`,
    which is made where it is needed. The result may hold updates of which nothing is known
    (`cdc_core.silver.quarantine.Split`).
    """
    # Also readable events are parted where an earlier one of their document waits: applied before it, they would build on
    # a document that lacks its change.
    waiting = _waiting(spark, table, before=span.after)
    if not has_suspects and (waiting is None or _of_same_keys(events, waiting).isEmpty()):
        return None
    delta.create(spark, table, columns=quarantine.COLUMNS_DDL, properties=PROPERTIES)
    known = spark.table(str(table)).limit(0) if waiting is None else waiting
    split = quarantine.split(events, waiting=known, to=span.to, keys=_concerned(events, known))
    # Noted before the range is applied: a crash in between repeats the range, and no event is in neither place.
    split.facts.writeTo(str(table)).append()
    return split.events


@dataclass
class HeldEvents:
    """Whether a quarantine holds any event, as this process sees its files: what `count` says, without a query."""

    live: live_files.LiveFiles
    _version: int = -1
    _are_none: bool = False

    @staticmethod
    def of(table: tables.TableRef) -> HeldEvents | None:
        """None where this process does not see the table."""
        folder = local_log.folder(table)
        return None if folder is None else HeldEvents(live_files.LiveFiles(folder))

    def are_none(self) -> bool:
        """Whether it holds none; False where that cannot be told from here."""
        newest = local_log.newest_version(self.live.folder)
        if newest is not None and newest != self._version:
            self._version, self._are_none = newest, self._hold_none(newest)
        return newest is not None and self._are_none

    def _hold_none(self, version: int) -> bool:
        columns = (*quarantine.IDENTITY, "reason", "to", "batch")
        try:
            if not self.live.at(version):
                return False
            facts = self.live.rows_above("to", -1, columns=columns, limit=MANY_FACTS)
        except (OSError, pa.ArrowException, live_files.NotReadable):
            return False
        newest: dict[tuple[Any, ...], tuple[int, bool, int]] = {}
        for *identity, reason, to, batch in zip(*(facts[name].to_pylist() for name in columns)):
            order = (to, reason in _ENDING_REASONS, batch)
            newest[tuple(identity)] = max(order, newest.get(tuple(identity), order))
        return all(is_ending for _, is_ending, _ in newest.values())


_ENDING_REASONS = frozenset(each.value for each in quarantine.ENDINGS)


def listed(
    spark: SparkSession, table: tables.TableRef, *, all_states: bool = False, with_texts: bool = False
) -> list[QuarantinedEvent]:
    """The events that are held, in the order of their sequence; with `all_states` those that were, too."""
    if not delta.exists(spark, table):
        return []
    facts = spark.table(str(table))
    chosen = quarantine.current(facts) if all_states else quarantine.held(facts)
    names = ("resume_token", "kind", "op", "key", "sequence", "batch", "reason")
    texts = F.struct("before", "after", *(f"updateDescription.{name}" for name in CORRECTABLE[2:]))
    columns = (
        F.concat_ws(".", "db", "collection").alias("collection"),
        *names,
        *([texts.alias("texts")] if with_texts else []),
    )
    return [_event(row) for row in chosen.select(*columns).orderBy("sequence", "batch").collect()]


def count(spark: SparkSession, table: tables.TableRef) -> int:
    """How many events a collection's quarantine holds."""
    return quarantine.held(spark.table(str(table))).count() if delta.exists(spark, table) else 0


def dismiss(spark: SparkSession, table: tables.TableRef, *, before_ms: int, applied: int) -> int:
    """Remove the facts about events from before a time whose stay ended in a batch up to `applied`; how many events.

    All facts of an event go in one commit: an older one that stayed behind would hold the event again. Raises `CommitConflict`.
    """
    ended = quarantine.current(spark.table(str(table))).where(
        F.col("reason").isin([each.value for each in quarantine.ENDINGS])
        & (F.col("ts_ms") < before_ms)
        & (F.col("to") <= applied)
    )
    chosen = query_execution.computed(ended.select(*quarantine.IDENTITY))
    view = f"ended_{uuid.uuid4().hex[:8]}"
    same = " AND ".join(f"t.`{name}` <=> s.`{name}`" for name in quarantine.IDENTITY)
    try:
        count = chosen.count()
        if count:
            chosen.createOrReplaceTempView(view)
            with table_errors.translating(table):
                spark.sql(f"MERGE INTO {table} AS t USING {view} AS s ON {same} WHEN MATCHED THEN DELETE").collect()
        return count
    finally:
        spark.catalog.dropTempView(view)
        query_execution.release(chosen)


def replay(
    spark: SparkSession,
    layout: tables.Layout,
    *,
    name: str,
    namespace: tuple[str, str],
    tokens: Collection[str] | None = None,
    corrections: Mapping[str, Mapping[str, str]] | None = None,
    now_ms: int,
    take_over: bool = False,
) -> ReplayResult:
    """Append events that are held to the bronze table of pipeline `name` again; silver then puts each in its
    place.

    `tokens` chooses events by their resume token (all by default); whatever else is held of the same
    documents comes along, because later updates only make sense with the ones before them. `corrections`
    gives new texts, by token and by name (one of `CORRECTABLE`). An event that still cannot be read stays, with
    all that follow it; one that is superseded by now changes nothing. Running it again before silver has run
    appends nothing.

    It writes bronze, so it needs bronze's claim: raises `TableOwned` or `LeaseHeld` while a capture service
    runs, and `SettingsError` for tokens that are not held and corrections that cannot be read.
    """
    table = layout.quarantine(*namespace)
    rows = _held_rows(spark, table)
    chosen = _chosen(rows, tokens)
    _check(chosen, tokens, corrections or {})
    corrected = [_corrected(row, (corrections or {}).get(row["resume_token"], {})) for row in chosen]
    readable = _readable(spark, corrected)
    still = len(corrected) - len(readable)
    waiting = _not_yet_again(spark, layout.bronze(name), readable)
    if not waiting:
        return ReplayResult(0, None, still)
    log = bronze_table.Log.open(spark, layout.bronze(name), take_over=take_over)
    # The capture goes by what the newest commit says of its stream: this commit must say the same.
    log.extra = {"stream": log.writer.metadata.get("stream")}
    try:
        return replace(_appended(log, waiting, now_ms), held=still)
    finally:
        log.close()


def of_pipeline(
    spark: SparkSession,
    settings: Settings,
    *,
    collection: str | None = None,
    all_states: bool = False,
    with_texts: bool = False,
) -> list[QuarantinedEvent]:
    """What `listed` says of each captured collection, or of one; `SettingsError` for one that silver does not know."""
    layout = delta.layout(settings.lakehouse)
    events: list[QuarantinedEvent] = []
    for namespace in registry.chosen(spark, settings, collection):
        table = layout.quarantine(namespace.db, namespace.collection)
        events += listed(spark, table, all_states=all_states, with_texts=with_texts)
    return events


def replay_pipeline(
    spark: SparkSession,
    settings: Settings,
    *,
    collection: str | None = None,
    tokens: Collection[str] | None = None,
    corrections: Mapping[str, Mapping[str, str]] | None = None,
    now_ms: int,
    take_over: bool = False,
) -> dict[str, ReplayResult]:
    """What `replay` did for each captured collection, or for one; tokens and corrections are of that one."""
    layout = delta.layout(settings.lakehouse)
    return {
        str(namespace): replay(
            spark,
            layout,
            name=settings.name,
            namespace=(namespace.db, namespace.collection),
            tokens=tokens,
            corrections=corrections,
            now_ms=now_ms,
            take_over=take_over,
        )
        for namespace in registry.chosen(spark, settings, collection)
    }


def read_corrections(text: str, *, where: str) -> dict[str, dict[str, str]]:
    """New texts by resume token and name, from a JSON object; `SettingsError` where it is none."""
    try:
        found = orjson.loads(text)
    except ValueError:
        found = None
    entries = list(found.values()) if isinstance(found, dict) else [None]
    if not all(isinstance(entry, dict) and all(isinstance(text, str) for text in entry.values()) for entry in entries):
        example = '{"<token>": {"after": "<the document as JSON text>"}}'
        raise errors.SettingsError(errors.Problem(where, "a JSON object by resume token is expected", example))
    return found


def to_json(found: Sequence[QuarantinedEvent] | Mapping[str, ReplayResult]) -> str:
    """Events, or what a replay did, as one JSON object with the names of the dataclasses' fields."""
    if isinstance(found, Mapping):
        done = [{"collection": name, **dataclasses.asdict(each)} for name, each in found.items()]
        return json.dumps({"collections": done}, indent=2)
    return json.dumps({"events": [_without_nothing(each) for each in found]}, indent=2)


def _without_nothing(event: QuarantinedEvent) -> dict[str, Any]:
    fields = dataclasses.asdict(event)
    return fields if event.texts is not None else {name: value for name, value in fields.items() if name != "texts"}


def waiting_keys(spark: SparkSession, table: tables.TableRef, *, since: str) -> DataFrame | None:
    """The keys, as `__key`, of documents with events of this sequence or later that are held; None where nothing is."""
    if not delta.exists(spark, table):
        return None
    held = quarantine.held(spark.table(str(table))).where((F.col("sequence") >= since) & F.col("key").isNotNull())
    return held.select(F.col("key").alias("__key")).distinct()


def supersede(spark: SparkSession, table: tables.TableRef, *, before: str, to: int) -> None:
    """End what is held with a sequence before this one: the collection was dropped or renamed since."""
    if not delta.exists(spark, table):
        return
    held = quarantine.held(spark.table(str(table))).where(F.col("sequence") < before)
    # A fact like any other, and no DELETE: what became of an event can be listed, and the table is only appended to.
    ended = {"reason": F.lit(quarantine.Reason.SUPERSEDED.value), "to": F.lit(to).cast("bigint")}
    facts = held.withColumns(ended).select(*spark.table(str(table)).columns)
    if not facts.isEmpty():
        facts.writeTo(str(table)).append()


def _waiting(spark: SparkSession, table: tables.TableRef, *, before: int) -> DataFrame | None:
    if not delta.exists(spark, table):
        return None
    return quarantine.held(spark.table(str(table)), before=before)


def _of_same_keys(events: DataFrame, waiting: DataFrame) -> DataFrame:
    keys = F.broadcast(waiting.select(F.col("key").alias("_key")).distinct())
    return events.select("key").join(keys, F.col("key") == F.col("_key"), "left_semi")


def _concerned(events: DataFrame, waiting: DataFrame) -> list[str] | None:
    """The keys that the quarantine has anything to do with; None where there are too many to name."""
    # One more than may be named is enough to know that they are too many.
    broken = events.where(quarantine.reason().isNotNull()).select("key")
    keys = broken.union(waiting.select("key")).where("key IS NOT NULL").distinct().limit(FEW + 1).collect()
    return [row.key for row in keys] if len(keys) <= FEW else None


def _event(row: Any) -> QuarantinedEvent:
    ending = {each.value for each in quarantine.ENDINGS}
    found = row.asDict(recursive=True)
    if "texts" in found:
        found["texts"] = {name: text for name, text in found["texts"].items() if text is not None}
    return QuarantinedEvent(**found, state=EventState.ENDED if row.reason in ending else EventState.HELD)


def _held_rows(spark: SparkSession, table: tables.TableRef) -> list[dict[str, Any]]:
    """The events that are held, as bronze's rows, each with `to`, in the order that they must apply in."""
    if not delta.exists(spark, table):
        return []
    held = quarantine.held(spark.table(str(table))).orderBy("sequence", "batch", "offset")
    return [row.asDict(recursive=True) for row in held.drop("reason").collect()]


def _chosen(rows: Sequence[dict[str, Any]], tokens: Collection[str] | None) -> list[dict[str, Any]]:
    if tokens is None:
        return list(rows)
    # All of a document's events come along, also those before the chosen one: a partial update makes sense only after them.
    keys = {row["key"] for row in rows if row["resume_token"] in tokens and row["key"] is not None}
    return [row for row in rows if row["resume_token"] in tokens or row["key"] in keys]


def _check(
    chosen: Sequence[Mapping[str, Any]],
    tokens: Collection[str] | None,
    corrections: Mapping[str, Mapping[str, str]],
) -> None:
    """Raise `SettingsError` with every token that is not held and every text that is no JSON document."""
    held = {row["resume_token"] for row in chosen}
    unknown = sorted({*(tokens or ()), *corrections} - held)
    problems = [errors.Problem(token, "no event with this resume token is held") for token in unknown]
    for token, texts in corrections.items():
        for field, text in texts.items():
            if field not in CORRECTABLE:
                problems.append(errors.Problem(f"{token}.{field}", f"one of {', '.join(CORRECTABLE)} is expected"))
            elif not _is_document(text):
                problems.append(errors.Problem(f"{token}.{field}", "the text is not a JSON document"))
    if problems:
        raise errors.SettingsError(problems)


def _is_document(text: str) -> bool:
    try:
        return isinstance(orjson.loads(text), dict)
    except ValueError:
        return False


def _corrected(row: Mapping[str, Any], texts: Mapping[str, str]) -> dict[str, Any]:
    whole = {name: text for name, text in texts.items() if name in ("before", "after")}
    parts = {name: text for name, text in texts.items() if name not in whole}
    description = row["updateDescription"]
    if parts:
        nothing = dict.fromkeys(field.name for field in bronze.UPDATE_DESCRIPTION)
        description = {**nothing, **(description or {}), **parts}
    return {**row, **whole, "updateDescription": description}


def _readable(spark: SparkSession, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that can be read now: of each document those before the first that still cannot."""
    if not rows:
        return []
    # The offset carries the row's number through Spark, which keeps no order.
    numbered = [{name: row[name] for name in bronze.SCHEMA.names} | {"offset": at} for at, row in enumerate(rows)]
    frame = spark.createDataFrame(pa.Table.from_pylist(numbered, schema=bronze.SCHEMA))
    judged = frame.select("offset", quarantine.reason().alias("reason")).where("reason IS NOT NULL").collect()
    reasons = {row.offset: row.reason for row in judged}
    # Backwards, so that a document's first unreadable event stays. One without a place in the order holds nothing back: nothing
    # can be said to come after it.
    blocked = {
        rows[at]["key"]: at
        for at, reason in sorted(reasons.items(), reverse=True)
        if reason != quarantine.Reason.NO_SEQUENCE.value
    }
    return [row for at, row in enumerate(rows) if at not in reasons and at < blocked.get(row["key"], len(rows))]


def _not_yet_again(spark: SparkSession, table: tables.TableRef, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of which bronze holds no copy after the range in which they were found."""
    if not rows:
        return []
    # Bronze keeps the first copy of an event, which is not after the range that put it into quarantine.
    since = min(row["to"] for row in rows)
    tokens = sorted({row["resume_token"] for row in rows})
    again = (
        spark.table(str(table))
        .where(F.col("batch") > since)
        .where(F.col("resume_token").isin(tokens))
        .select("resume_token", "kind", "key", "batch")
        .collect()
    )
    newest: dict[tuple[str, str, str | None], int] = {}
    for row in again:
        identity = (row.resume_token, row.kind, row.key)
        newest[identity] = max(row.batch, newest.get(identity, 0))
    return [row for row in rows if newest.get((row["resume_token"], row["kind"], row["key"]), 0) <= row["to"]]


def _appended(log: bronze_table.Log, rows: Sequence[dict[str, Any]], now_ms: int) -> ReplayResult:
    """One commit: the events, then a heartbeat that keeps the capture service's position."""
    if log.position is None:
        raise errors.DecisionNeeded(f"{log.table.label}: bronze is empty, there is nothing to replay onto")
    token = log.position.token

    # The heartbeat comes last because a capture starts from the token of bronze's last row: the events' own tokens are old.
    def numbered(batch: int, first: int) -> pa.Table:
        again = [
            {name: row[name] for name in bronze.SCHEMA.names} | {"batch": batch, "offset": first + number}
            for number, row in enumerate(rows)
        ]
        heartbeat = bronze_table.heartbeat_row(
            {"replay": {"events": len(rows)}},
            token=token,
            batch=batch,
            offset=first + len(rows),
            ts_ms=now_ms,
        )
        return pa.concat_tables([pa.Table.from_pylist(again, schema=bronze.SCHEMA), heartbeat])

    return ReplayResult(len(rows), log.append(numbered, token=token).batch)
