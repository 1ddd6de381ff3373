"""One collection's claimed silver table, with its settings, schema and caches.

A `SilverCollection` lives as long as the claim on its table. `pipelines.silver.ranges` applies events to it; `pipelines.silver.sweeps`
removes rows after a drop, a rename or a finished snapshot.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace

from pyspark.sql import DataFrame, SparkSession

from cdc_core.bronze.batch_range import BatchRange
from cdc_core.bronze.collection_ends import Sweep
from cdc_core.properties import unwrap as unwrap_options
from cdc_core.schema import document_schema
from cdc_core.settings.parse import CollectionSettings
from cdc_core.silver import reduce
from cdc_core.tables import layout as tables
from pipelines.bronze import collection_events, quarantine_table, registry, survey
from pipelines.delta.writer import Writer
from pipelines.schema import log as schemas
from pipelines.schema.document_typer import DocumentTyper
from pipelines.silver.read_ahead import ReadAhead


@dataclass
class SilverCollection:
    """One collection's table, claimed by `writer`, with its schema as `ops/schemas` keeps it."""

    spark: SparkSession
    namespace: registry.Namespace
    options: CollectionSettings
    keeps_document: bool
    """Whether its rows contain whole documents; decided for each work if the settings leave it to the capture mode."""
    layout: tables.Layout
    bronze: tables.TableRef
    writer: Writer
    schema: schemas.SchemaVersion
    is_new: bool
    bronze_columns: tuple[str, ...] = field(init=False)
    """The columns of bronze, beside the document, that rows are made from."""
    reserved: frozenset[str] = frozenset()
    """Columns that `add.fields` or `add.headers` made, now or earlier: no field of a document gets their names."""
    origin: str = ""
    """A new random name if all events are applied again, so that gold starts again too; otherwise empty."""
    remembered: int | None = None
    """The version of the table of remembered deletes that holds the last of them, if this process can read it."""
    delete_files: int = 0
    """Surplus files of the remembered deletes after their last compaction (`maintenance.compact_facts`)."""
    held_files: int = 0
    """The same for its quarantine."""
    lacks_quarantine: bool = False
    """Whether its quarantine is known not to exist: nobody else creates it while the table is claimed, and in a store to look for it is a
    request."""
    has_told_of_quarantine: bool = False
    """Whether the log says that events went there, since the table was claimed."""
    quarantined: quarantine_table.HeldEvents | None = None
    """Its events in quarantine, once there are any."""
    ahead: ReadAhead = field(default_factory=ReadAhead)
    """Reads the events of ranges that this process applies itself (`pipelines.silver.in_process`)."""
    typer: DocumentTyper = field(init=False)
    """Types the documents of such ranges."""

    def __post_init__(self) -> None:
        self.typer = DocumentTyper(self.options)
        self.bronze_columns = reduce.needed(self.options.unwrap)
        self._always_keeps_document = self.keeps_document

    @property
    def mode(self) -> unwrap_options.DeleteMode:
        """What a delete does: `delete.tombstone.handling.mode`."""
        return self.options.unwrap.delete_tombstone_handling_mode

    @property
    def quarantine(self) -> tables.TableRef:
        """The table of its events that cannot be applied."""
        return self.layout.quarantine(*self.namespace)

    @property
    def deletes(self) -> tables.TableRef:
        """The table of its remembered deletes, which is created with the first of them."""
        return self.layout.deletes(*self.namespace)

    def rows(self) -> DataFrame:
        """The table as it is now. Not cached: a DataFrame keeps the columns and files that it was made with."""
        return self.spark.table(str(self.writer.table))

    def events(self, span: BatchRange) -> DataFrame:
        """Its events in a span of bronze's batches, unordered."""
        return survey.events(self.spark, self.bronze, self.namespace, span)

    def keep_documents(self, position: registry.SilverPosition, span: BatchRange) -> bool | None:
        """Decide whether whole documents are kept for the current work; whether the table's rows hold them afterwards, None if only some do.

        After a change of the capture mode, partial updates may still come, and rows at `position` have documents to fold them onto. They
        may also come after ranges without one: the capture may go on in the old mode for a while.
        """
        if self._always_keeps_document:
            return True
        may_fold = self.options.keep_document is None and position.documents is not False and not self.is_empty()
        self.keeps_document = may_fold and collection_events.has_partial(
            self.spark, self.bronze, self.namespace, span, is_last=False
        )
        if not may_fold:
            return False
        return position.documents if self.keeps_document else None

    def is_empty(self) -> bool:
        """Whether the table was never written, so that its first rows are appended without a MERGE."""
        # Not `is_new` alone: a table that a repair set back to batch 0 has rows, and its commits say so.
        return self.is_new and self.writer.metadata.get("to") is None

    @functools.cached_property
    def added_paths(self) -> list[tuple[str, ...] | None]:
        """Where bronze has the values of `add.fields` and `add.headers`, as in `AddedColumn.path`."""
        return [each.path for each in reduce.added(self.options.unwrap)]

    def added(self, schema: document_schema.DocumentSchema) -> tuple[reduce.AddedColumn, ...]:
        """The columns of `add.fields` and `add.headers`, beside those of a schema's documents."""
        return reduce.added(self.options.unwrap, documents=(name for name, _ in schema.table()), earlier=self.reserved)

    def shows_deleted(self, counts: survey.EventCounts) -> bool:
        """Whether there are deletes, and deleted documents stay in the table."""
        return counts.deletes > 0 and self.mode.marks_deleted

    def move(self, next_position: registry.SilverPosition) -> None:
        """Move the position alone, by an empty commit."""
        self.writer.mark(to=next_position.to, extra=self.metadata(next_position))

    def metadata(self, position: registry.SilverPosition) -> dict[str, object]:
        """The metadata of a commit with this position, beside `to`."""
        return replace(position, deletes=self.remembered).extra


@dataclass(frozen=True)
class CollectionWork:
    """The events and sweeps that one collection's table lacks, between its position and the batch `to`."""

    namespace: registry.Namespace
    position: registry.SilverPosition
    to: int
    counts: survey.EventCounts
    sweeps: tuple[Sweep, ...] = ()

    @property
    def span(self) -> BatchRange:
        """The batches to apply."""
        return BatchRange(self.position.to, self.to)
