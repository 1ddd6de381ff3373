"""Bronze's side of a comparison: one document per key, computed from bronze's events alone.

It is the last whole document of the key, with later partial updates folded onto it. A delete ends it; a drop, a rename and the end of a
snapshot of the whole collection end all older documents. Without a schema: documents are compared as Extended JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from cdc_core import errors
from cdc_core.bronze import columns as bronze
from cdc_core.bronze.batch_range import BatchRange
from cdc_core.schema.document_schema import DocumentSchema
from cdc_core.signals import signal as signals
from cdc_core.silver import quarantine as quarantine_rules
from cdc_core.silver import reduce
from cdc_core.sql.names import literal
from cdc_core.tables import layout as tables
from cdc_core.verify import equality
from pipelines.bronze import log as bronze_log
from pipelines.bronze import registry, survey
from pipelines.delta import query_execution
from pipelines.verify.table_rows import HELD, HELD_DDL


@dataclass(frozen=True)
class FoldedDocument:
    """A key's document in bronze: its text, None if bronze only has updates of it."""

    text: str | None
    is_incomplete: bool


@dataclass(frozen=True)
class BronzeState:
    """One collection's documents in bronze up to `batch`; `version` is the table's version."""

    spark: SparkSession
    table: tables.TableRef
    namespace: registry.Namespace
    batch: int
    version: int

    def digests(self, schema: DocumentSchema) -> DataFrame:
        """Every document's key and digest, as `HELD`; the schema is not used."""
        return self._documents(self._events()).mapInArrow(_digests, HELD_DDL)

    def some(self, keys: Sequence[str], schema: DocumentSchema) -> dict[str, list[FoldedDocument]]:
        """The documents of these keys."""
        if not keys:
            return {}
        documents = self._documents(self._events(keys))
        return {row["__key"]: [FoldedDocument(row.document, row.incomplete)] for row in documents.collect()}

    def bare(self, keys: Sequence[str]) -> dict[str, list[FoldedDocument]]:
        """The documents of these keys, without their texts."""
        if not keys:
            return {}
        documents = self._documents(self._events(keys)).drop("document")
        return {row["__key"]: [FoldedDocument(None, row.incomplete)] for row in documents.collect()}

    def compared(self, text: str, folded: FoldedDocument, schema: DocumentSchema) -> tuple[equality.Difference, ...]:
        """The differences of a source document and bronze's."""
        return equality.exact_differences(text, folded.text or "{}")

    def sampled(self, documents: int) -> list[str]:
        """The keys of this many random documents."""
        keys = self._documents(self._events()).select("__key").orderBy(F.rand()).limit(documents)
        return [row["__key"] for row in keys.collect()]

    def _events(self, keys: Sequence[str] | None = None) -> DataFrame:
        """The events since the last drop, rename or snapshot of the whole collection, of these keys or of all."""
        span = BatchRange(0, self.batch)
        _, sweeps = survey.surveyed(self.spark, self.table, span, only=self.namespace)
        events = survey.events(self.spark, self.table, self.namespace, span)
        if sweeps:
            events = events.where(f"sequence >= {literal(max(sweep.first for sweep in sweeps))}")
        # Before the texts are looked at, which are read whole.
        return _with_holes(events if keys is None else query_execution.with_values(events, "key", keys))

    def _documents(self, events: DataFrame) -> DataFrame:
        """`__key, document, incomplete`: one row per key that is not deleted."""
        counts = events.agg(F.count("*").alias("events"), F.count_if(reduce.is_partial()).alias("partial")).first()
        if not counts.partial:
            can_broadcast = counts.events <= survey.MAX_BROADCAST_EVENTS
            latest = reduce.latest_of_many(events) if can_broadcast else reduce.latest(events, has_partial=False)
            rows = latest.where(F.col("op") != bronze.Op.DELETE.value)
            return rows.select(
                F.col("key").alias("__key"), F.col("after").alias("document"), F.lit(False).alias("incomplete")
            )
        is_delete, is_updated = F.coalesce("is_delete", F.lit(False)), F.col("updates").isNotNull()
        rows = reduce.histories(events).where(~is_delete | is_updated)
        # Updates after a delete belong to another document of the key, which bronze never had.
        base = F.when(is_updated & ~is_delete, F.col("after")).alias("base")
        fold_inputs = rows.select(F.col("key").alias("__key"), "after", "updates", base)
        documents = fold_inputs.mapInArrow(reduce.fold_rows, f"__key STRING, after STRING, {reduce.FOLDED_DDL}")
        was_folded = F.col("incomplete").isNotNull()
        return documents.select(
            "__key",
            F.when(was_folded, F.col("document")).otherwise(F.col("after")).alias("document"),
            F.coalesce("incomplete", F.lit(False)).alias("incomplete"),
        )


def _with_holes(events: DataFrame) -> DataFrame:
    """The events, with unreadable ones as holes that leave a document incomplete, unless they came again and could be read."""
    flagged_events = events.withColumn("is_unreadable", quarantine_rules.reason().isNotNull())
    unreadable_events = flagged_events.where("is_unreadable")
    if unreadable_events.isEmpty():
        return events
    readable_ids = flagged_events.where("NOT is_unreadable").select(*quarantine_rules.IDENTITY)
    holes = unreadable_events.join(readable_ids, [*quarantine_rules.IDENTITY], "left_anti").select(*events.columns)
    readable = flagged_events.where("NOT is_unreadable").select(*events.columns)
    return readable.unionByName(quarantine_rules.readable(holes, with_holes=True).select(*events.columns))


def _digests(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        # An incomplete document gets no digest, so that it is looked at closely and reported as incomplete.
        texts = zip(batch.column("document").to_pylist(), batch.column("incomplete").to_pylist())
        digests = [0 if text is None or incomplete else equality.exact_digest(text) for text, incomplete in texts]
        arrays = [batch.column("__key").cast(pa.string()), pa.array(digests, pa.int64())]
        yield pa.RecordBatch.from_arrays(arrays, schema=HELD)


def check_whole(spark: SparkSession, table: tables.TableRef, namespace: registry.Namespace) -> None:
    """Raise `DecisionNeeded` if bronze lacks events that a collection's documents depend on."""
    if not bronze_log.is_whole(spark, table, str(namespace)):
        raise errors.DecisionNeeded(
            f"verifying {namespace}: old events were removed from bronze, so it no longer has a complete state of its "
            f"own. Verify silver or gold, or run {signals.snapshot_command(str(namespace))}"
        )
