"""The step `evolved`: grows the document schema for the batch's documents, and moves events that cannot be read to quarantine.

The schema is appended to `ops/schemas` before any table has its columns. After a crash in between, the same documents find it there and
change nothing.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping
from dataclasses import replace

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from cdc_core.bronze import columns as bronze
from cdc_core.schema.evolution import MAX_FIELDS, grown
from cdc_core.silver import quarantine as quarantine_rules
from cdc_core.silver import reduce
from cdc_core.sql.names import literal
from pipelines.bronze import survey
from pipelines.schema import batch_evolution, looks
from pipelines.schema import log as schemas
from pipelines.silver import batch as batches
from pipelines.silver.batch import RowBatch
from pipelines.silver.collection import SilverCollection

log = logging.getLogger(__name__)


def _braced(text: str) -> str:
    """SQL for whether a text starts and ends like a document; cheaper than LIKE."""
    return f"(startswith({text}, '{{') AND endswith({text}, '}}'))"


_PARTIAL = "(op = 'u' AND `after` IS NULL)"
COUNTED = {
    "partial": _PARTIAL,
    # Wider and cheaper than `quarantine_rules.is_suspect`: evaluated for each event; the exact one only if this counts any.
    "suspect": (
        f"key IS NULL OR NOT coalesce(sequence RLIKE {literal(bronze.SEQUENCE)}, false) OR op IS NULL "
        f"OR op NOT IN ('c', 'u', 'd', 'r') OR (op IN ('c', 'r') AND `after` IS NULL) OR (op <> 'd' AND NOT {_braced('`after`')})"
    ),
}
"""Conditions that are counted in the same query that reads the documents for their schema."""


def evolved(collection: SilverCollection, batch: RowBatch) -> RowBatch:
    """Step: the batch's readable events, with the plan that types them; the others go to quarantine."""
    texts, conditions, events = looked_at(collection, batch.rows, batch.counts), COUNTED, batch.counts.events
    if collection.keeps_document:
        texts = texts.withColumn("__unreadable", quarantine_rules.is_unreadable_update())
        conditions = COUNTED | {"updates": "`__unreadable`"}
    # Not recorded yet: documents that go to quarantine must not add columns.
    evolution = evolve(collection, texts, also=conditions, events=events)
    suspects = evolution.refused + evolution.also["suspect"] + evolution.also.get("updates", 0)
    has_suspects = suspects > 0 and not batch.rows.where(quarantine_rules.is_suspect()).isEmpty()
    readable_events = batches.applicable(collection, batch, has_suspects=has_suspects)
    if readable_events is None:
        record(collection, evolution, batch.number)
        return replace(batch, plan=evolution.plan, partial=evolution.also["partial"])
    if has_suspects:
        tell_of_quarantine(collection)
    evolution = evolve(collection, looked_at(collection, readable_events, batch.counts), also=COUNTED, events=events)
    record(collection, evolution, batch.number)
    # The pending search for keys includes those of events in quarantine, whose rows must stay.
    return replace(batch, rows=readable_events, plan=evolution.plan, partial=evolution.also["partial"], pending_deletes=None)


_QUARANTINED = (
    "%s: events cannot be read and wait in quarantine, with those that follow them; medallion quarantine list shows them"
)


def tell_of_quarantine(collection: SilverCollection) -> None:
    """Log that events went to quarantine, once: a service may find some in each round."""
    if not collection.has_told_of_quarantine:
        collection.has_told_of_quarantine = True
        log.warning(_QUARANTINED, collection.namespace)


def evolve(
    collection: SilverCollection,
    texts: DataFrame,
    *,
    also: Mapping[str, str],
    events: int,
) -> batch_evolution.Evolution:
    """How the documents change the collection's schema; the caller must `record` it."""
    return batch_evolution.evolve(
        # Of few events the first documents are all of them, without a search.
        looks.SparkDocuments(texts, small=events <= looks.BEGINNING),
        current=collection.schema.schema,
        options=collection.options.unwrap,
        pins=collection.options.pins,
        also=also,
        reserved=collection.reserved,
    )


_GROWN = (
    "%s: the nested document %s has grown to %d fields; beyond %d, values of new ones are rescued. If their names are data, set "
    "map.fields: [%s] and run medallion rebuild --collection %s"
)


def record(collection: SilverCollection, evolution: batch_evolution.Evolution, number: int) -> None:
    """Append changes, if any, to the schemas; to be called before the table has the columns."""
    if not evolution.changes:
        return
    ops, name, before = collection.layout.ops("schemas"), str(collection.namespace), collection.schema
    collection.schema = schemas.record(collection.writer, ops, before, evolution, collection=name, batch=number)
    for path, count in grown(before.schema, evolution.schema).items():
        log.warning(_GROWN, name, path, count, MAX_FIELDS, path, shlex.quote(name))


def ensured_schema(collection: SilverCollection, batch: RowBatch) -> bool:
    """Whether there is a schema; if not, one is made from the first documents where they allow it."""
    if not collection.schema.schema.fields:
        evolution = batch_evolution.begun(
            looks.SparkDocuments(batch.rows),
            options=collection.options.unwrap,
            pins=collection.options.pins,
            reserved=collection.reserved,
        )
        if evolution is not None:
            record(collection, evolution, batch.number)
    return bool(collection.schema.schema.fields)


def looked_at(collection: SilverCollection, events: DataFrame, counts: survey.EventCounts) -> DataFrame:
    """The events with every document that the schema must hold in `after`: deleted ones too, if their rows stay."""
    return _with_deleted(events) if collection.shows_deleted(counts) else events


def _with_deleted(events: DataFrame) -> DataFrame:
    """The events, with what is known of a deleted document in `after`."""
    is_delete = F.col("op") == bronze.Op.DELETE.value
    return events.withColumn("after", F.when(is_delete, reduce.deleted_document()).otherwise(F.col("after")))
