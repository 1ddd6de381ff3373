"""Rebuilds a silver table: applies all of bronze's events of a collection to a shadow table, compares the two, and swaps the rows.

    shadowed   bronze batches from 0 to the table's position, or all of a bronze that was created again, are applied to an empty table
               (a bronze that maintenance has trimmed must contain a snapshot of the whole collection);
               again from the start with wider types, as long as there are rescued values that a wider column would hold
    compared   rows, keys and documents, with the columns in which they differ
    swapped    the deletes, the events in quarantine and the schema are stored, then one commit replaces the table's rows and columns

The swap gives the table a new *generation*. The new schema is stored under that generation and takes effect with the commit; gold rewrites
its table when it sees a new one. A crash before the swap leaves the table unchanged; a crash after it leaves only the shadow, which the
next rebuild removes. A rebuild may be repeated at any time.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from cdc_core import errors
from cdc_core.bronze.batch_range import BatchRange
from cdc_core.schema import document_schema, evolution, retype
from cdc_core.schema.document_schema import DocumentSchema
from cdc_core.settings.parse import CollectionSettings, Settings
from cdc_core.signals import signal as signals
from cdc_core.tables import layout as tables
from cdc_core.tables.layout import Layer
from cdc_core.typed import exact
from cdc_core.typed import plan as typed
from pipelines.bronze import collection_events, quarantine_table, registry, survey
from pipelines.bronze import log as bronze_log
from pipelines.delta import live_files, local_log, ops_tables, table_comparison, table_schema
from pipelines.delta import tables as delta
from pipelines.delta.table_comparison import Comparison
from pipelines.delta.writer import Writer
from pipelines.schema import batch_evolution
from pipelines.schema import log as schemas
from pipelines.silver import ranges
from pipelines.silver import tables as silver_tables
from pipelines.silver.collection import CollectionWork, SilverCollection

log = logging.getLogger(__name__)

FEW_RESCUED = 100_000
"""The most rescued values that are looked at in this process, which takes seconds."""

RENEW_SECONDS = 30.0
"""How often a rebuild renews its claim on the live table, at most."""


@dataclass(frozen=True)
class RebuildResult:
    """The result of a rebuild; `version` is the table's version with the rebuilt rows, None if nothing was swapped."""

    collection: str
    layer: Layer
    table: str
    to: int
    comparison: Comparison
    changes: tuple[evolution.Change, ...]
    version: int | None
    seconds: float = 0.0


def rebuilt_for_rescued(
    collection: SilverCollection,
    settings: Settings,
    position: registry.SilverPosition,
    *,
    after: int,
    stop: threading.Event,
) -> registry.SilverPosition | None:
    """Rebuild the table if a wider column would hold values that its rows of batches after `after` rescued (`schema.on.conflict: retype`).

    Returns the position after the rebuild, or `position` if none is due. None if the table cannot be rebuilt from bronze, or `stop` is set:
    the values stay rescued, and the caller does not try it again before the next start. One document never stops a collection.
    """
    seed = _wider(collection, after=after)
    if seed is None:
        return position
    args = (collection.spark, settings, collection.layout, collection.namespace, collection.writer)
    work = SilverRebuild(*args, is_trial=False, drops_lost=False, stop=stop)
    try:
        refuse(work.run(seed))
    except errors.MedallionError as error:
        if type(error) not in (errors.DecisionNeeded, errors.Temporary):
            raise
        log.warning("values stay rescued until the next start: %s", error)
        return None
    new_position = registry.silver_position(collection.spark, collection.writer.table)
    collection.schema, collection.remembered = work.recorded_schema(new_position), new_position.deletes
    return new_position


def refuse(result: RebuildResult) -> None:
    """Raise `DecisionNeeded` if a rebuild swapped nothing because rows would be lost."""
    lost_count = result.comparison.lost
    if result.layer is Layer.SILVER and result.version is None and lost_count:
        raise errors.DecisionNeeded(
            f"{result.table}: bronze contains neither a delete nor all the data of {lost_count:,} of its documents (without "
            "keep.document no partial update is applied), so the table was not swapped. --dry-run shows some of them; "
            "--drop-missing drops them"
        )


def remove_left(
    spark: SparkSession,
    layout: tables.Layout,
    namespace: registry.Namespace,
    *,
    claim: Callable[[tables.TableRef], Writer],
) -> bool:
    """Remove the shadow that a killed rebuild left in a folder that this process sees; whether one is gone that was there.

    Under the table's claim, which a running rebuild holds: nothing is removed then.
    """
    shadow = layout.shadow(*namespace)
    folder = None if shadow.root is None else local_log.folder(tables.TableRef.at(shadow.root))
    if folder is None or not folder.exists():
        return False
    try:
        with claim(layout.silver(*namespace)).released():
            delta.remove(spark, shadow)
    except (errors.TableOwned, errors.LeaseHeld):
        return False
    if is_left := folder.exists():
        log.warning("%s: what a killed rebuild left here can only be removed by the user who started it", folder)
    return not is_left


@dataclass
class SilverRebuild:
    """One rebuild of one table, which `writer` has claimed."""

    spark: SparkSession
    settings: Settings
    layout: tables.Layout
    namespace: registry.Namespace
    writer: Writer
    is_trial: bool
    drops_lost: bool
    stop: threading.Event

    def run(self, seed: DocumentSchema = document_schema.EMPTY) -> RebuildResult:
        """Rebuild the table; `seed` is the schema with which the shadow starts."""
        if not delta.exists(self.spark, self._bronze):
            raise errors.DecisionNeeded(f"{self._bronze.label}: there is no bronze to rebuild from; restore it first")
        position = registry.silver_position(self.spark, self.writer.table)
        newest = bronze_log.newest(self.spark, self._bronze)
        is_of_other = position.is_of_other(newest.log)
        if is_of_other or not position.to:
            # It counts another bronze's batches, or a repair has reset it: all of this bronze is applied.
            position = replace(position, to=newest.batch)
        self._check_bronze(position.to)
        generation = uuid.uuid4().hex[:12]
        schema_version = self.recorded_schema(position)
        with self._shadows(generation) as shadows:
            shadow, shadow_position = self._retyped(shadows, seed, position.to)
            # Again: maintenance may have removed events before they were read. It says so before it removes any.
            self._check_bronze(position.to)
            live_rows, rebuilt_rows = self.spark.table(str(self.writer.table)), self.spark.table(str(shadow.writer.table))
            deletes = self._deletes(shadow.layout)
            comparison = table_comparison.compared(live_rows, rebuilt_rows, deletes=deletes)
            changes = evolution.differences(schema_version.schema, shadow.schema.schema)
            version = None
            if not self.is_trial and (self.drops_lost or not comparison.lost):
                # Schema and deletes before the swap: a crash in between must leave neither a generation without a schema nor rows that a
                # late event could bring back. A schema whose generation no table names has no effect.
                self._note(schema_version, shadow.schema.schema, changes, position, generation)
                self._remember(deletes)
                # Before the swap, too: the rebuilt rows lack the quarantined events, and these batches are not read again.
                quarantine_table.adopt(
                    self.spark,
                    self.layout.quarantine(*self.namespace),
                    other=shadow.quarantine,
                    to=position.to,
                    replaces=is_of_other,
                )
                self.writer.replace(
                    rebuilt_rows,
                    to=position.to,
                    extra=replace(
                        shadow_position,
                        generation=generation,
                        log=newest.log or position.log,
                        origin=position.origin,
                        bronze=newest.commit,
                        deletes=registry.deletes_version(self.spark, self.layout.deletes(*self.namespace)),
                    ).extra,
                    properties=silver_tables.PROPERTIES | {registry.GENERATION: generation},
                    cluster_by=("__key",),
                )
                version = self.writer.version
        label = self.writer.table.label
        return RebuildResult(str(self.namespace), Layer.SILVER, label, position.to, comparison, changes, version)

    # --- the shadow

    @property
    def _bronze(self) -> tables.TableRef:
        return self.layout.bronze(self.settings.name)

    def _check_bronze(self, to: int) -> None:
        edges = self.spark.sql(f"SELECT min(batch) AS first, max(batch) AS last FROM {self._bronze}").first()
        if (edges.last or 0) < to or not bronze_log.is_whole(self.spark, self._bronze, str(self.namespace)):
            raise errors.DecisionNeeded(
                f"{self._bronze.label}: it has batches {edges.first} to {edges.last}, but rebuilding {self.namespace} "
                f"needs 1 to {to}, or a full snapshot. Run {signals.snapshot_command(str(self.namespace))}, and then "
                "rebuild again"
            )

    @contextmanager
    def _shadows(self, generation: str) -> Iterator[Iterator[tables.Layout]]:
        """Layouts for shadows, each to be used once; all their tables are removed, at the end and from earlier rebuilds."""
        delta.remove(self.spark, self.layout.shadow(*self.namespace))  # left by a killed rebuild
        try:
            # Each attempt at its own path: Delta caches the log of a path, also after its table is removed.
            yield (self.layout.shadow(*self.namespace, f"{generation}-{number}") for number in itertools.count())
        finally:
            delta.remove(self.spark, self.layout.shadow(*self.namespace))

    def _retyped(
        self, shadows: Iterator[tables.Layout], schema: DocumentSchema, to: int
    ) -> tuple[SilverCollection, registry.SilverPosition]:
        """A shadow without rescued values that a wider type of their column would hold.

        This ends because types only get wider: BIGINT, DOUBLE, STRING.
        """
        seed: DocumentSchema | None = schema
        while seed is not None:
            shadow, position = self._built(next(shadows), seed, to)
            seed = _wider(shadow)
            if seed is not None:
                delta.remove(self.spark, shadow.layout)
        return shadow, position

    def _built(
        self, layout: tables.Layout, seed: DocumentSchema, to: int
    ) -> tuple[SilverCollection, registry.SilverPosition]:
        """A shadow in `layout` with bronze's batches up to `to`, applied range by range, and its position."""
        table, span = layout.silver(*self.namespace), BatchRange(0, to)
        silver_tables.create(self.spark, table)
        shadow = SilverCollection(
            spark=self.spark,
            namespace=self.namespace,
            options=self._options(),
            keeps_document=self.settings.keeps_document(
                str(self.namespace),
                # Partial updates of an earlier capture mode.
                has_waiting=lambda: collection_events.has_partial(
                    self.spark, self._bronze, self.namespace, span, is_last=True
                ),
            ),
            layout=layout,
            bronze=self._bronze,
            writer=Writer.claim(self.spark, table),
            schema=schemas.SchemaVersion(schema=seed),
            is_new=True,
        )
        _, sweeps = survey.surveyed(self.spark, self._bronze, span, only=self.namespace)
        position = registry.SilverPosition()
        renewed_at = time.monotonic()
        events = survey.events(self.spark, self._bronze, self.namespace, span)
        for range_ in survey.bounded(events, span=span, limit=self._options().max_batch_events):
            if self.stop.is_set():
                raise errors.Temporary(f"{self.writer.table.label}: stopped before the swap; the table is unchanged")
            counts = survey.counts_of(self.spark, self._bronze, self.namespace, range_)
            due = tuple(
                sweep
                for sweep in sweeps
                if sweep.batch <= range_.to and sweep.is_due(after=range_.after, swept=position.swept)
            )
            work = CollectionWork(self.namespace, position, range_.to, counts, due)
            # An event that is never set: a range is applied whole, and `stop` is checked between two ranges.
            position = ranges.apply(shadow, work, stop=threading.Event()).position
            if time.monotonic() - renewed_at >= RENEW_SECONDS:  # building a shadow takes longer than a lease lasts
                self.writer.renew()
                renewed_at = time.monotonic()
        return shadow, position

    def _options(self) -> CollectionSettings:
        return self.settings.silver.for_collection(str(self.namespace))

    # --- stored before the swap

    def recorded_schema(self, position: registry.SilverPosition) -> schemas.SchemaVersion:
        """The recorded schema of the table's generation."""
        name = str(self.namespace)
        generations = {name: position.generation}
        return schemas.latest(self.spark, self.layout.ops("schemas"), generations=generations).get(
            name, schemas.SchemaVersion()
        )

    def _note(
        self,
        previous: schemas.SchemaVersion,
        schema: DocumentSchema,
        changes: Sequence[evolution.Change],
        position: registry.SilverPosition,
        generation: str,
    ) -> None:
        """Append the schema under its generation; it takes effect when a commit of the table names that."""
        rebuild_change = evolution.Change("", evolution.ChangeKind.REBUILT, position.generation or None, generation)
        plan = typed.Plan(schema)
        schemas.append(
            self.spark,
            self.layout.ops("schemas"),
            collection=str(self.namespace),
            version=previous.version + 1,
            batch=position.to,
            evolution=batch_evolution.Evolution(schema, (rebuild_change, *changes), plan),
            generation=generation,
        )

    def _deletes(self, layout: tables.Layout) -> DataFrame | None:
        table = layout.deletes(*self.namespace)
        return self.spark.table(str(table)) if delta.exists(self.spark, table) else None

    def _remember(self, deletes: DataFrame | None) -> None:
        """Append the shadow's deletes that are not remembered yet; the others stay, they may be older than bronze."""
        if deletes is None:
            return
        # Only new ones: a repeated rebuild must not make the table longer each time.
        old_deletes = self._deletes(self.layout)
        new_deletes = deletes if old_deletes is None else deletes.join(old_deletes, ["__key", "__sequence"], "left_anti")
        table = self.layout.deletes(*self.namespace)
        rows = new_deletes.select("__key", "__sequence", "__batch")
        if not rows.isEmpty():
            silver_tables.create_deletes(self.spark, table)
            ops_tables.append(rows, table)


def _wider(collection: SilverCollection, *, after: int = -1) -> DocumentSchema | None:
    """The collection's schema, widened for the values that its rows of batches after `after` rescued; None if nothing gets wider."""
    schema = collection.schema.schema
    conflicts = _conflicts_here(collection.writer, schema, after=after)
    if conflicts is None:
        rows = collection.spark.table(str(collection.writer.table)).where(F.col("__batch") > after)
        conflicts = read_conflicts(rows, schema)
    wider_schema, changes = retype.with_wider_types(schema, conflicts, pins=collection.options.pins)
    return wider_schema if changes else None


def read_conflicts(silver: DataFrame, schema: DocumentSchema) -> tuple[retype.Conflict, ...]:
    """The conflicts of a silver table's rescued values with its schema, each once."""
    # Distinct on the executors: a table may have as many rescued values as rows, but few kinds of conflicts.
    entries = silver.where("size(`__rescued`) > 0").select(F.explode("__rescued").alias("path", "text"))
    rows = entries.mapInArrow(exact.conflict_batches(schema.to_json()), "conflict STRING").distinct().collect()
    return tuple(retype.Conflict.from_json(row.conflict) for row in sorted(rows))


def _conflicts_here(writer: Writer, schema: DocumentSchema, *, after: int) -> tuple[retype.Conflict, ...] | None:
    """`read_conflicts` without a query, which every run would need; None if this process cannot read the rows, or they rescued more than
    `FEW_RESCUED` values."""
    live = writer.live

    def entries(live: live_files.LiveFiles) -> Iterator[pa.RecordBatch]:
        count = 0
        for part in live.parts_above("__batch", after, columns=["__rescued"]):
            # Not `drop_null`, which may return a slice: `keys` are those of the whole array.
            for rescued in part["__rescued"].filter(pc.is_valid(part["__rescued"])).chunks:
                count += len(rescued.keys)
                if count > FEW_RESCUED:
                    raise table_schema.NotReadable
                yield pa.RecordBatch.from_arrays([rescued.keys, rescued.items], names=["path", "text"])

    try:
        if live is None or not live.move_to(writer.version):
            return None
        (found,) = exact.conflict_batches(schema.to_json())(entries(live))
    except table_schema.NotReadable:
        return None
    return tuple(map(retype.Conflict.from_json, sorted(found["conflict"].to_pylist())))
