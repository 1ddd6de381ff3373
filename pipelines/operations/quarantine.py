"""Lists events that silver could not read, and replays them through bronze.

    listed    the events in a collection's quarantine, and their state
    replay    appends events that can be read now to bronze again, with their original sequence

`pipelines.bronze.quarantine_table` has the tables, and how events get into them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import operator
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from cdc_core import errors
from cdc_core.bronze import columns as bronze
from cdc_core.extended_json import json_to_bson
from cdc_core.extended_json import keys as canonical_keys
from cdc_core.settings.parse import Settings
from cdc_core.silver import fold
from cdc_core.silver import quarantine as quarantine_rules
from cdc_core.tables import layout as tables
from pipelines.bronze import log as bronze_log
from pipelines.bronze import quarantine_table, registry
from pipelines.delta import query_execution
from pipelines.delta import tables as delta
from pipelines.spark import parallel

CORRECTABLE = ("before", "after", "updatedFields", "disambiguatedPaths")
"""The texts of an event that a replay may correct."""


class EventState(StrEnum):
    """Whether an event is still in quarantine."""

    HELD = "held"
    ENDED = "ended"


@dataclass(frozen=True)
class QuarantinedEvent:
    """One event of a quarantine, with the reason and its state.

    `texts` has its documents by the names of `CORRECTABLE`; None without `with_texts`.
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
    """How many events were appended to bronze again, and the last batch of them; None without any.

    `held` counts the events that stay in quarantine: they still cannot be read, or follow one that cannot.
    """

    events: int
    batch: int | None
    held: int = 0


def listed(
    spark: SparkSession,
    table: tables.TableRef,
    *,
    all_states: bool = False,
    with_texts: bool = False,
    most: int | None = None,
) -> Iterator[QuarantinedEvent]:
    """The held events by sequence, at most `most`; with `all_states` also those that have left quarantine."""
    if delta.found(spark, table) is None:
        return
    held_events = None if all_states else quarantine_table.HeldEvents.of(spark, table)
    if held_events is not None and held_events.count() == 0:  # the usual case, without a query
        return
    facts = spark.table(str(table))
    events = quarantine_rules.current(facts) if all_states else quarantine_rules.held(facts)
    names = ("resume_token", "kind", "op", "key", "sequence", "batch", "reason")
    texts = F.struct("before", "after", *(f"updateDescription.{name}" for name in CORRECTABLE[2:]))
    columns = (
        F.concat_ws(".", "db", "collection").alias("collection"),
        *names,
        *([texts.alias("texts")] if with_texts else []),
    )
    rows = events.select(*columns).orderBy("sequence", "batch")
    # One after the other: with their documents they may be larger than memory.
    yield from map(_event, (rows if most is None else rows.limit(most)).toLocalIterator())


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
    """Append held events to the bronze table of pipeline `name` again; silver then applies them in their original order.

    `tokens` chooses events by resume token (default: all), together with all other held events of the same documents, because later
    updates need the earlier ones. `corrections` gives new texts by token and name (one of `CORRECTABLE`). An event that still cannot be
    read stays, with all later ones of its document; one that is superseded by now changes nothing. Running it again before silver has
    run appends nothing.

    Needs bronze's claim: raises `TableOwned` or `LeaseHeld` while a capture runs. Raises `SettingsError` for tokens that are not held
    and corrections that cannot be read.
    """
    table, texts = layout.quarantine(*namespace), corrections or {}
    if delta.found(spark, table) is None:
        _check([], tokens, texts)
        return ReplayResult(0, None)
    if not delta.exists(spark, bronze_table := layout.bronze(name)):
        raise errors.DecisionNeeded(
            f"{bronze_table.label}: bronze is gone, into which events are replayed; restore it first"
        )
    # Before the events: silver may be about to end the stay of some.
    applied = registry.silver_position(spark, layout.silver(*namespace)).to
    held_events = quarantine_rules.held(spark.table(str(table))).drop("reason")
    token_rows = _chosen(_of_tokens(held_events, {*(tokens or ()), *texts}), tokens)
    _check(token_rows, tokens, texts)
    if tokens is not None:
        held_events = query_execution.with_values(held_events, "key", [row["key"] for row in token_rows])
    # An event without a key belongs to no document; a correction cannot give it one.
    keyless_count = (
        held_events.where("key IS NULL").count() if tokens is None else sum(row["key"] is None for row in token_rows)
    )
    documents = _held_documents(held_events)
    portions = [*_portions(documents)]
    result = ReplayResult(0, None, keyless_count)
    if not portions:
        return result
    since = max(applied, pc.min(documents["to"]).as_py())
    rows = _with_copies(held_events, spark.table(str(bronze_table)), since=since)
    with contextlib.ExitStack() as stack:
        if len(portions) > 1:
            rows = stack.enter_context(query_execution.held(rows))
        log: bronze_log.BronzeLog | None = None
        for keys in portions:
            portion_rows = [_corrected(row, texts) for row in _collected(query_execution.with_values(rows, "key", keys))]
            readable_rows = _readable(spark, portion_rows)
            new_rows = [row for row in readable_rows if not row["is_again"]]
            result = replace(result, held=result.held + len(portion_rows) - len(readable_rows))
            if new_rows:
                if log is None:
                    log = _opened(spark, bronze_table, take_over=take_over)
                    stack.callback(log.close)
                batch = _appended(log, new_rows, now_ms)
                result = replace(result, events=result.events + len(new_rows), batch=batch)
    return result


def _opened(spark: SparkSession, table: tables.TableRef, *, take_over: bool) -> bronze_log.BronzeLog:
    log = bronze_log.BronzeLog.open(spark, table, take_over=take_over)
    # The capture reads its stream's settings from the newest commit: this commit must repeat them.
    log.extra = {name: log.writer.metadata.get(name) for name in bronze_log.OF_THE_STREAM}
    return log


def of_pipeline(
    spark: SparkSession,
    settings: Settings,
    *,
    collection: str | None = None,
    all_states: bool = False,
    with_texts: bool = False,
    most: int | None = None,
    failures: parallel.Failures,
) -> Iterator[QuarantinedEvent]:
    """The result of `listed` for all captured collections, or for one; `SettingsError` if silver does not know it.

    Errors of single collections go to `failures`, except for a chosen one.
    """
    layout = delta.layout(settings.lakehouse)
    for namespace in registry.chosen(spark, settings, collection):
        table = layout.quarantine(*namespace)
        try:
            yield from listed(spark, table, all_states=all_states, with_texts=with_texts, most=most)
        except Exception as error:
            if collection is not None:
                raise
            failures.note(str(namespace), error)


def replay_pipeline(
    spark: SparkSession,
    settings: Settings,
    *,
    collection: str | None = None,
    tokens: Collection[str] | None = None,
    corrections: Mapping[str, Mapping[str, str]] | None = None,
    now_ms: int,
    take_over: bool = False,
    failures: parallel.Failures,
) -> dict[str, ReplayResult]:
    """The result of `replay` for each captured collection, or for one, to which tokens and corrections belong.

    Errors of single collections go to `failures`, except for a chosen one.
    """

    def again(session: SparkSession, namespace: registry.Namespace) -> ReplayResult:
        return replay(
            session,
            delta.layout(settings.lakehouse),
            name=settings.name,
            namespace=namespace,
            tokens=tokens,
            corrections=corrections,
            now_ms=now_ms,
            take_over=take_over,
        )

    replay_guarded = failures.guarding(again, name=str) if collection is None else again
    results = {
        str(namespace): replay_guarded(spark, namespace) for namespace in registry.chosen(spark, settings, collection)
    }
    return {name: result for name, result in results.items() if result is not None}


def read_corrections(text: str, *, where: str) -> dict[str, dict[str, str]]:
    """New texts by resume token and name, from a JSON object; raises `SettingsError` for other content."""
    try:
        corrections = orjson.loads(text)
        json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError):
        corrections = None
    entries = list(corrections.values()) if isinstance(corrections, dict) else [None]
    if not all(isinstance(entry, dict) and all(isinstance(text, str) for text in entry.values()) for entry in entries):
        example = '{"<token>": {"after": "<the document as JSON text>"}}'
        message = "expected a JSON object by resume token, with each of them once"
        raise errors.SettingsError(errors.Problem(where, message, example))
    return corrections


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The pairs as an object; raises `ValueError` for a repeated name, of which readers keep the last: a chunk's rows share a token."""
    if len(names := dict(pairs)) < len(pairs):
        raise ValueError("a name is repeated")
    return names


def to_json(results: Mapping[str, ReplayResult]) -> str:
    """The results of a replay as one JSON object with the names of the dataclass's fields."""
    collections = [{"collection": name, **dataclasses.asdict(each)} for name, each in results.items()]
    return json.dumps({"collections": collections}, indent=2)


def json_parts(events: Iterator[QuarantinedEvent]) -> Iterator[str]:
    """The same for events, in parts: there may be more of them than fit into memory."""
    first = next(events, None)  # its error comes before any part
    yield '{\n  "events": ['
    separator = ""
    for event in () if first is None else itertools.chain([first], events):
        yield f"{separator}\n{textwrap.indent(json.dumps(_event_fields(event), indent=2), '    ')}"
        separator = ","
    yield "\n  ]\n}" if separator else "]\n}"


def _event_fields(event: QuarantinedEvent) -> dict[str, Any]:
    fields = dataclasses.asdict(event)
    return fields if event.texts is not None else {name: value for name, value in fields.items() if name != "texts"}


def _event(row: Any) -> QuarantinedEvent:
    fields = row.asDict(recursive=True)
    if "texts" in fields:
        fields["texts"] = {name: text for name, text in fields["texts"].items() if text is not None}
    return QuarantinedEvent(**fields, state=EventState.ENDED if row.reason in quarantine_rules.ENDINGS else EventState.HELD)


PORTION_EVENTS = 20_000
PORTION_BYTES = 64 * 2**20
"""Limits of the events in one commit, which are in memory: a quarantine may have a million events, or documents of 16 MB. The events of
one document stay together."""


def _of_tokens(quarantined: DataFrame, tokens: Collection[str]) -> list[dict[str, Any]]:
    """Token and key of the events with these tokens."""
    if not tokens:
        return []
    events = query_execution.with_values(quarantined, "resume_token", tokens).select("resume_token", "key")
    return [row.asDict() for row in events.collect()]


def _held_documents(events: DataFrame) -> pa.Table:
    """For each document with held events their count, their bytes, and the smallest batch at which one was quarantined (`to`)."""
    texts = ("before", "after", "payload", *(f"updateDescription.{name}" for name in CORRECTABLE[2:]))
    size = functools.reduce(operator.add, (F.coalesce(F.length(text), F.lit(0)) for text in texts))
    by_key = events.where("key IS NOT NULL").groupBy("key")
    return by_key.agg(F.count("*").alias("events"), F.sum(size).alias("bytes"), F.min("to").alias("to")).toArrow()


def _portions(documents: pa.Table) -> Iterator[list[str]]:
    """The keys of documents in portions, each for one commit."""
    keys: list[str] = []
    events = size = 0
    for key, count, size_bytes in zip(*(documents[name].to_pylist() for name in ("key", "events", "bytes"))):
        events, size = events + count, size + size_bytes
        if keys and (events > PORTION_EVENTS or size > PORTION_BYTES):
            yield keys
            keys, events, size = [], count, size_bytes
        keys.append(key)
    if keys:
        yield keys


def _with_copies(events: DataFrame, bronze_rows: DataFrame, *, since: int) -> DataFrame:
    """The events with `is_again`: whether bronze has a copy after the batch `since` and the range that quarantined the event."""
    # The first copy of an event is within that range. An earlier replay that silver has applied does not count: the fact that ended the
    # event's stay was lost, by a RESTORE or with a file, and silver does not read that batch again.
    later_rows = bronze_rows.where(F.col("batch") > since).select(*quarantine_rules.IDENTITY, "batch")
    copy_rows = later_rows.join(F.broadcast(events.select("resume_token").distinct()), "resume_token", "left_semi")
    copies = copy_rows.groupBy(*(F.col(name).alias(f"_{name}") for name in quarantine_rules.IDENTITY)).agg(
        F.max("batch").alias("_batch")
    )
    joined = events.join(copies, F.expr(quarantine_rules.IS_SAME), "left").withColumn(
        "is_again", F.coalesce(F.col("_batch") > F.col("to"), F.lit(False))
    )
    return joined.drop("_batch", *(f"_{name}" for name in quarantine_rules.IDENTITY))


def _collected(rows: DataFrame) -> list[dict[str, Any]]:
    """The events as rows of bronze, in the order in which they apply."""
    return [row.asDict(recursive=True) for row in rows.orderBy("sequence", "batch", "offset").collect()]


def _chosen(rows: Sequence[dict[str, Any]], tokens: Collection[str] | None) -> list[dict[str, Any]]:
    if tokens is None:
        return list(rows)
    # All held events of a document, also those before the chosen one: a partial update needs them.
    keys = {row["key"] for row in rows if row["resume_token"] in tokens and row["key"] is not None}
    return [row for row in rows if row["resume_token"] in tokens or row["key"] in keys]


def _check(
    events: Sequence[Mapping[str, Any]],
    tokens: Collection[str] | None,
    corrections: Mapping[str, Mapping[str, str]],
) -> None:
    """Raise `SettingsError` with all tokens that are not held and all texts that are not JSON documents."""
    by_token: dict[str, list[Mapping[str, Any]]] = {}
    for row in events:
        by_token.setdefault(row["resume_token"], []).append(row)
    unknown_tokens = sorted({*(tokens or ()), *corrections} - by_token.keys())
    problems = [errors.Problem(token, "no event with this resume token is in quarantine") for token in unknown_tokens]
    for token, texts in corrections.items():
        if token in by_token and len({row["key"] for row in by_token[token] if _is_of(row, texts)}) != 1:
            problems.append(errors.Problem(f"{token}.after", "expected the _id of one of the quarantined documents"))
        for field, text in texts.items():
            if field not in CORRECTABLE:
                problems.append(errors.Problem(f"{token}.{field}", f"expected one of {', '.join(CORRECTABLE)}"))
            elif not fold.is_document(text):
                problems.append(errors.Problem(f"{token}.{field}", "the text is not a JSON document"))
            elif field == "disambiguatedPaths" and not fold.are_steps(text):
                message = 'the steps of each path are expected, as {"a.b.0": ["a.b", 0]}'
                problems.append(errors.Problem(f"{token}.{field}", message))
    if problems:
        raise errors.SettingsError(problems)


def _is_of(row: Mapping[str, Any], texts: Mapping[str, str]) -> bool:
    """Whether new texts belong to this event: all events of a snapshot's chunk share one token, so the `_id` in `after` decides."""
    try:
        return canonical_keys.canonical_raw(json_to_bson.loads(texts.get("after", ""))) == row["key"]
    except (KeyError, ValueError):  # documents may lack fields, even `_id`
        return True


def _corrected(row: Mapping[str, Any], corrections: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    texts = corrections.get(row["resume_token"], {})
    if not _is_of(row, texts):
        return dict(row)
    documents = {name: text for name, text in texts.items() if name in ("before", "after")}
    description_texts = {name: text for name, text in texts.items() if name not in documents}
    description = row["updateDescription"]
    if description_texts:
        empty = dict.fromkeys(field.name for field in bronze.UPDATE_DESCRIPTION)
        description = {**empty, **(description or {}), **description_texts}
    return {**row, **documents, "updateDescription": description}


def _readable(spark: SparkSession, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that can be read now; for each document only those before the first unreadable one."""
    if not rows:
        return []
    # The row number goes through Spark as offset, because Spark does not keep the order.
    numbered_rows = [
        {name: row[name] for name in bronze.SCHEMA.names} | {"offset": number} for number, row in enumerate(rows)
    ]
    frame = spark.createDataFrame(pa.Table.from_pylist(numbered_rows, schema=bronze.SCHEMA))
    unreadable_rows = frame.select("offset", quarantine_rules.reason().alias("reason")).where("reason IS NOT NULL").collect()
    reasons = {row.offset: row.reason for row in unreadable_rows}
    # Backwards, so that a document's first unreadable event wins. An event without a sequence blocks none, because none is known to be
    # later.
    first_unreadable = {
        rows[number]["key"]: number
        for number, reason in sorted(reasons.items(), reverse=True)
        if reason != quarantine_rules.Reason.NO_SEQUENCE.value
    }
    return [
        row
        for number, row in enumerate(rows)
        if number not in reasons and number < first_unreadable.get(row["key"], len(rows))
    ]


def _appended(log: bronze_log.BronzeLog, rows: Sequence[dict[str, Any]], now_ms: int) -> int:
    """Append the events in one commit, then a heartbeat that keeps the capture's position; returns the batch."""
    if log.position is None:
        raise errors.DecisionNeeded(f"{log.table.label}: bronze is empty; there is nothing to replay")
    token = log.position.token

    # The heartbeat is last: a capture starts from the token of bronze's last row, and the events' tokens are old.
    def numbered(batch: int, first: int) -> pa.Table:
        event_rows = [
            {name: row[name] for name in bronze.SCHEMA.names} | {"batch": batch, "offset": first + number}
            for number, row in enumerate(rows)
        ]
        heartbeat = bronze_log.heartbeat_row(
            {"replay": {"events": len(rows)}},
            token=token,
            batch=batch,
            offset=first + len(rows),
            ts_ms=now_ms,
        )
        return pa.concat_tables([pa.Table.from_pylist(event_rows, schema=bronze.SCHEMA), heartbeat])

    return log.append(numbered, token=token).batch
