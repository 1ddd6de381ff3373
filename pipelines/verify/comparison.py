"""Compares one collection with its table: first by digests, then the differing documents by key.

A document that differs in the first comparison may have changed while it was read. So a key is only judged if the table has all its events
up to the time of the read, and no later ones; otherwise it is read again, for `PATIENCE_SECONDS`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from cdc_core.extended_json import keys as canonical_keys
from cdc_core.extended_json import query
from cdc_core.settings.parse import Settings
from cdc_core.stream import fields as field_filters
from cdc_core.stream import resume_token
from cdc_core.tables import layout as tables
from cdc_core.tables.layout import Layer
from cdc_core.verify import equality
from pipelines.bronze import registry
from pipelines.delta import query_execution
from pipelines.mongodb import catalog, document_keys
from pipelines.mongodb import client as mongodb
from pipelines.mongodb import connection as connections
from pipelines.mongodb import server as mongodb_server
from pipelines.schema import log as schemas
from pipelines.verify import bronze_state, documents, explanations, table_progress, table_rows
from pipelines.verify.result import CollectionVerification, KeyDifference, KeyVerdict

PATIENCE_SECONDS = 60.0
"""How long one close look waits for the table to pass its time, and how long changing documents are read again."""
MOST_WRONG = 20_000
"""After this many wrong keys, the other suspects count as `unsettled`; so do those beyond the next two limits."""
MOST_SUSPECTS = 1_000_000
"""The most keys that are looked at closely."""
LOOK_SECONDS = 900.0
"""How long close looks are started: if layers are far behind, each look waits for them."""
SLICE = 2_000
"""The most keys in one close look; fewer where their documents are large (`documents.LOOK_BYTES`)."""
READ_TIMES = 3
"""How often a collection is read whole if a column was widened meanwhile."""


@dataclass(frozen=True)
class VerifyContext:
    """Shared by the comparisons of one run. `at` is the cluster time of `--as-of`, None for now."""

    spark: SparkSession
    settings: Settings
    connection: connections.Connection
    client: mongodb.Client
    layout: tables.Layout
    bronze: tables.TableRef
    stop: threading.Event
    layer: Layer
    at: documents.Time | None
    documents_per_second: float | None


@dataclass(frozen=True)
class _FullRead:
    """The first comparison of a collection: the numbers of documents, of equal ones and of rows kept without a document, the keys that
    differ (`suspects`), and the number of further ones (`unsettled`)."""

    documents: int
    equal: int
    kept: int
    suspects: tuple[str, ...]
    unsettled: int


@dataclass(frozen=True)
class _SettledKeys:
    """The verdicts on keys that were looked at closely, the number of equal documents among them, and the number of keys that were not
    looked at."""

    verdicts: list[KeyDifference]
    equal: int
    unsettled: int


@dataclass
class CollectionComparison:
    """The comparison of one collection. `last` is the latest cluster time of a read, `version` the table's version that was compared.

    `gone` are keys that neither the source nor the table has: they count as equal, but not as documents.
    """

    context: VerifyContext
    namespace: registry.Namespace
    progress: table_progress.TableProgressReader
    collection: catalog.SourceCollection | None
    last: documents.Time = (0, 0)
    version: int | None = None

    def __post_init__(self) -> None:
        self.spark = self.context.spark
        self.known = explanations.Explanations(self.context.settings, self.progress, has_source=self.collection is not None)
        self.gone: set[str] = set()
        # Bronze first, so that all later reads, also on a secondary, see at least what bronze has now; except with --as-of.
        position = table_progress.position_of(self.spark, self.context.bronze)
        self.first_batch = position.batch if self.context.at is None else 0
        now = mongodb_server.operation_time(self.context.client)
        self.begun = (now.time, now.inc)

    # --- schema and reads

    def _schema(self, progress: table_progress.TableProgress | None = None) -> schemas.SchemaVersion:
        """The schema of the table's columns, at this progress or now: the newest one of its generation, where the table has all of its columns.
        Otherwise gold is behind silver, or silver has not committed yet, and it is that of the table's batch."""
        if self.context.layer is Layer.BRONZE:  # it has untyped documents
            return schemas.SchemaVersion()
        generations = {(name := str(self.namespace)): self.progress.generation()}
        ops, to = self.context.layout.ops("schemas"), self.progress.position() if progress is None else progress.to
        newest = schemas.latest(self.spark, ops, generations=generations).get(name, schemas.SchemaVersion())
        # Not by the batch alone: a table that was set back to an earlier one keeps its columns.
        if not to or table_rows.has_columns_of(newest.schema, self.progress.columns(progress)):
            return newest
        return schemas.latest(self.spark, ops, generations=generations, until=to).get(name, schemas.SchemaVersion())

    def _reading(self, schema: schemas.SchemaVersion, *, is_whole: bool) -> documents.ReadSpec:
        assert self.collection is not None
        source = self.context.settings.source
        field_rules = field_filters.read(source.field_exclude_list, source.field_renames)
        at = self.context.at if is_whole else None
        return documents.ReadSpec(
            connection=self.context.connection,
            collection=self.collection,
            after=at or self.begun,
            schema=None if self.context.layer is Layer.BRONZE else schema.schema.to_json(),
            is_exact=at is not None,
            fields=field_rules.of(*self.namespace) if field_rules.entries else None,
            condition=self._filter if is_whole else None,
            documents_per_second=self.context.documents_per_second,
        )

    @property
    def _filter(self) -> str | None:
        """The snapshot's filter: other documents come to bronze only with their first change."""
        return self.context.settings.source.snapshot_collection_filter_overrides.get(str(self.namespace))

    # --- first comparison

    def whole(self) -> CollectionVerification:
        """Compare all documents and rows."""
        for attempt in range(READ_TIMES):
            schema = self._schema()
            full_read = self._first_sight(schema)
            if len(full_read.suspects) <= SLICE or attempt == READ_TIMES - 1 or self._schema() == schema:
                break  # read again if a column was widened meanwhile, which changes every row's digest
        close_look = self._settled(full_read.suspects)
        # Documents that are judged equal count; keys that are gone from both do not.
        equal = full_read.equal + close_look.equal
        unsettled = full_read.unsettled + close_look.unsettled
        result = self._result(full_read.documents, equal, close_look.verdicts, unsettled=unsettled)
        return replace(result, kept=result.kept + full_read.kept)

    def _first_sight(self, schema: schemas.SchemaVersion) -> _FullRead:
        threads = _threads(self.spark)
        if self.collection is None:
            digests = self.spark.createDataFrame([], documents.READ_DDL)
        else:
            reading = self._reading(schema, is_whole=True)
            ranges = documents.ranges(self.context.client, reading, threads=threads)
            pace = reading.documents_per_second
            range_reading = replace(reading, documents_per_second=pace / min(threads, len(ranges)) if pace else None)
            digests = documents.digests(self.spark, range_reading, ranges)
        with query_execution.held(digests) as source_digests:
            last = F.max(F.struct("seconds", "increment")).alias("last")
            totals = source_digests.agg(F.count("*").alias("n"), last, F.max("error").alias("error")).first()
            if totals.error is not None:
                raise documents.error_of(totals.error)
            self.last = max(self.last, tuple(totals.last) if totals.last else self.begun)
            progress = self.progress.past(self.last, until=time.monotonic() + PATIENCE_SECONDS)
            self.version = progress.state.version
            rows = progress.state.digests(schema.schema).groupBy("key")
            # A key in two rows is an error, whatever their content.
            rows = rows.agg(F.count("*").alias("rows"), F.first("digest").alias("held"))
            joined = source_digests.select("key", "digest").join(rows, "key", "full")
            is_equal = (F.col("rows") == 1) & (F.col("digest") == F.col("held"))
            suspects = joined.where(~F.coalesce(is_equal, F.lit(False)))
            is_document = F.col("digest").isNotNull()
            # There may be as many of these as the source ever deleted: they are not looked at closely. But under the snapshot's filter, a
            # row without a document may be that of a document that was not read here.
            is_kept = ~is_document & (F.col("rows") == 1) & F.lit(self._filter is None and self.known.keeps_rows())
            flags = suspects.select("key", is_document.alias("is_document"), is_kept.alias("is_kept"))
            with query_execution.held(flags) as suspect_flags:
                counts = [F.count("*").alias("n"), *(F.count_if(name).alias(name) for name in ("is_document", "is_kept"))]
                suspect_counts = suspect_flags.agg(*counts).first()
                keys = [row.key for row in suspect_flags.where("NOT is_kept").select("key").limit(MOST_SUSPECTS).collect()]
        unlisted = suspect_counts.n - suspect_counts.is_kept - len(keys)
        return _FullRead(totals.n, totals.n - suspect_counts.is_document, suspect_counts.is_kept, tuple(keys), unlisted)

    def sampled(self, documents_wanted: int) -> CollectionVerification:
        """Compare a random sample of this many documents of the source, and of as many rows of the table."""
        table = self.progress.newest()
        source_keys = {} if self.collection is None else dict.fromkeys(self._chosen_ids(documents_wanted))
        keys = {**source_keys, **dict.fromkeys(table.sampled(documents_wanted))}
        close_look = self._settled(tuple(keys))
        document_count, equal = len(keys) - len(self.gone), close_look.equal
        return replace(
            self._result(document_count, equal, close_look.verdicts, unsettled=close_look.unsettled), is_sample=True
        )

    def _chosen_ids(self, wanted: int) -> list[str]:
        assert self.collection is not None
        condition = None if self._filter is None else query.loads(self._filter)
        ids = document_keys.sampled_ids(self.context.client, self.collection, documents=wanted, condition=condition)
        return [canonical_keys.canonical_raw(raw) for raw in ids]

    # --- close looks

    def _settled(self, keys: Sequence[str]) -> _SettledKeys:
        """The verdicts on the keys, slice by slice. Waiting and changing keys are read again for `PATIENCE_SECONDS`."""
        self.gone.clear()
        verdicts: list[KeyDifference] = []
        waiting: list[KeyDifference] = []
        wrong_count = offset = 0
        end = time.monotonic() + LOOK_SECONDS
        until = time.monotonic() + PATIENCE_SECONDS
        while offset < len(keys) and wrong_count < MOST_WRONG and time.monotonic() < end and not self.context.stop.is_set():
            until = time.monotonic() + PATIENCE_SECONDS
            explained, moving = self._parted(keys[offset : offset + SLICE], until=until)
            offset += len(explained) + len(moving)
            verdicts += explained
            waiting += moving
            wrong_count += sum(each.kind.is_wrong for each in explained)
        while waiting and self._can_settle(waiting, until=until):
            waiting_keys, waiting = [each.key for each in waiting], []
            while waiting_keys:
                explained, moving = self._parted(waiting_keys[:SLICE], until=until)
                del waiting_keys[: len(explained) + len(moving)]
                verdicts += explained
                waiting += moving
        # Keys that are gone from both sides are no documents.
        equal = sum(each.kind is KeyVerdict.EQUAL and each.key not in self.gone for each in verdicts)
        return _SettledKeys([*verdicts, *waiting], equal, len(keys) - offset)

    def _parted(self, keys: Sequence[str], *, until: float) -> tuple[list[KeyDifference], list[KeyDifference]]:
        """The verdicts of one close look at the first keys: explained ones, and those that another look may change."""
        verdicts = self._looked(keys, until=until)
        moving = [each for each in verdicts if each.kind.is_moving]
        return self.known.explained([each for each in verdicts if not each.kind.is_moving]), moving

    def _can_settle(self, waiting: Sequence[KeyDifference], *, until: float) -> bool:
        """Whether another look may change a verdict, and there is time for it."""
        is_over = time.monotonic() >= until or self.context.stop.is_set()
        return not is_over and (any(each.kind is KeyVerdict.CHANGING for each in waiting) or self.progress.captures())

    def _looked(self, keys: Sequence[str], *, until: float) -> list[KeyDifference]:
        """The verdicts on the first keys, at least on one: as many as have documents that are held at once."""
        if self.collection is None:
            now = mongodb_server.operation_time(self.context.client)
            source_documents = documents.nothing((now.time, now.inc), keys)
        else:
            reading = self._reading(self._schema(), is_whole=False)
            source_documents = documents.by_keys(self.context.client, reading, keys, wait=self.context.stop.wait)
        first, last = min(each.at for each in source_documents.values()), max(each.at for each in source_documents.values())
        self.last = max(self.last, last)
        progress = self.progress.past(last, until=until)
        self.version = progress.state.version
        schema = self._schema(progress)
        # Of a key without a document only the number of rows counts: they may be large.
        present_keys = [key for key, each in source_documents.items() if each.text is not None]
        gone_keys = [key for key, each in source_documents.items() if each.text is None]
        rows: dict[str, Sequence[equality.TableRow | bronze_state.FoldedDocument]] = {
            **progress.state.some(present_keys, schema.schema),
            **progress.state.bare(gone_keys),
        }
        key_events = self.progress.moved(progress, source_documents, since=first, first=self.first_batch)

        def difference(text: str, row: Any) -> tuple[equality.Difference, ...]:
            return progress.state.compared(text, row, schema.schema)

        verdicts = [
            self._judged(key, document, rows.get(key, []), progress, key_events.get(key), difference)
            for key, document in source_documents.items()
        ]
        if self._schema() == schema:
            return verdicts
        # The table may have been at a later batch, with other columns, than its position said.
        return [
            replace(each, kind=KeyVerdict.CHANGING, paths=()) if each.kind is KeyVerdict.DIFFERENT else each
            for each in verdicts
        ]

    def _judged(
        self,
        key: str,
        document: documents.SourceDocument,
        rows: Sequence[equality.TableRow | bronze_state.FoldedDocument],
        progress: table_progress.TableProgress,
        moved: table_progress.KeyEvents | None,
        difference: Callable[[str, Any], tuple[equality.Difference, ...]],
    ) -> KeyDifference:
        if len(rows) == 1 and document.text is not None:
            paths = difference(document.text, rows[0])
            if not paths:
                return KeyDifference(key, KeyVerdict.EQUAL)
        else:
            paths = ()
        # Before any verdict on the difference, which an event that is not applied yet would explain.
        if key in progress.unseen or (moved is not None and moved.unapplied):
            return KeyDifference(key, KeyVerdict.WAITING)
        # The row may be newer than the document that was read, which is read again.
        if moved is not None and moved.sequence > resume_token.snapshot_sequence(*document.at):
            return KeyDifference(key, KeyVerdict.CHANGING)
        if document.text is None and not rows:
            self.gone.add(key)
            return KeyDifference(key, KeyVerdict.EQUAL)
        if not rows:
            return KeyDifference(key, KeyVerdict.MISSING)
        # Known from the events; for silver, `explanations` looks at the column.
        if any(isinstance(row, bronze_state.FoldedDocument) and row.is_incomplete for row in rows):
            return KeyDifference(key, KeyVerdict.INCOMPLETE, paths)
        if len(rows) > 1:
            return KeyDifference(key, KeyVerdict.DIFFERENT, (equality.Difference("", f"{len(rows)} rows"),))
        if document.text is None:
            return KeyDifference(key, KeyVerdict.WAITING if progress.awaits_sweep else KeyVerdict.EXTRA)
        return KeyDifference(key, KeyVerdict.DIFFERENT, paths)

    # --- result

    def repaired(self, before: CollectionVerification, keys: Sequence[str]) -> CollectionVerification:
        """The result after a repair of these keys, each of which is compared again."""
        now = mongodb_server.operation_time(self.context.client)
        self.begun = (now.time, now.inc)
        verdicts = self._settled(keys).verdicts
        repaired_keys = {each.key for each in verdicts}
        other_differences = [each for each in before.differences if each.key not in repaired_keys]
        equal_verdicts = [each for each in verdicts if each.kind is KeyVerdict.EQUAL]
        repaired_documents = sum(each.key not in self.gone for each in equal_verdicts)
        result = self._result(before.documents, before.equal + repaired_documents, [*other_differences, *verdicts])
        unlisted = before.kept - sum(each.kind is KeyVerdict.KEPT for each in before.differences)
        return replace(
            result,
            kept=result.kept + unlisted,
            repaired=len(equal_verdicts),
            unsettled=before.unsettled,
            is_sample=before.is_sample,
        )

    def _result(
        self, read: int, equal: int, verdicts: Sequence[KeyDifference], *, unsettled: int = 0
    ) -> CollectionVerification:
        # Only the first ones are shown and stored: there may be many more that are explained, or wait, than wrong ones.
        differences = sorted(
            (each for each in verdicts if each.kind is not KeyVerdict.EQUAL),
            key=lambda each: (not each.kind.is_wrong, each.key),
        )
        counts = {
            kind.value: sum(each.kind is kind for each in differences) for kind in KeyVerdict if kind is not KeyVerdict.EQUAL
        }
        return CollectionVerification(
            collection=str(self.namespace),
            layer=self.context.layer,
            table=self.progress.table.label,
            version=self.version,
            as_of=f"{self.last[0]}.{self.last[1]}",
            documents=read,
            equal=equal,
            unsettled=unsettled,
            is_sample=False,
            differences=tuple(differences),
            **counts,
        )


def _threads(spark: SparkSession) -> int:
    """How many ranges Spark reads at a time."""
    try:
        return int(spark.sparkContext.defaultParallelism)
    except Exception:  # not known over Spark Connect
        return 8
