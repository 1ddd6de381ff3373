"""One collection's silver table: what it is, what the settings say of it, and what it holds.

A `SilverCollection` lives as long as the claim on its table. What happens to it is in other modules: `pipelines.silver.ranges`
applies events to it, `pipelines.silver.sweeps` ends it at a drop, a rename or a finished snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from cdc_core.bronze.batch_range import BatchRange
from cdc_core.bronze.collection_ends import Sweep
from cdc_core.properties import unwrap as unwrap_options
from cdc_core.schema import document_schema
from cdc_core.silver import reduce
from cdc_core.tables import layout as tables
from pipelines.bronze import collection_events, quarantine_table, registry, survey
from pipelines.delta.writer import Writer
from pipelines.schema import log as schemas
from pipelines.schema.document_typer import DocumentTyper
from pipelines.silver.read_ahead import ReadAhead

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from cdc_core.settings.parse import CollectionSettings


@dataclass
class SilverCollection:
    """One collection's table, claimed by `writer`, with its schema as `ops/schemas` keeps it."""

    spark: SparkSession
    namespace: registry.Namespace
    options: CollectionSettings
    keeps_document: bool
    """Whether its rows hold whole documents; of the work at hand, where the settings leave it to the capture mode."""
    layout: tables.Layout
    bronze: tables.TableRef
    writer: Writer
    schema: schemas.SchemaVersion
    is_new: bool
    bronze_columns: tuple[str, ...] = field(init=False)
    """Columns of bronze beside the document that a row is made of."""
    reserved: frozenset[str] = frozenset()
    """Columns of the table that `add.fields` made, now or once: no field of a document gets their names."""
    origin: str = ""
    """A new random name where its rows begin anew, by which gold knows that it has to; empty where they go on."""
    max_local_events: int = 0
    """How many events of a range this process may apply itself, without a query (`pipelines.silver.in_process`)."""
    needs_steps: bool = False
    """Whether a range of the work at hand went through the steps: this process could not apply it."""
    remembered: int | None = None
    """The version of the table of remembered deletes that holds the last of them, where this process sees it."""
    delete_files: int = 0
    """Files of remembered deletes that the last compaction left beyond those that their size explains."""
    held_files: int = 0
    """The same of its quarantine."""
    quarantined: quarantine_table.HeldEvents | None = None
    """What is known of its events in quarantine, once there is one."""
    ahead: ReadAhead = field(default_factory=ReadAhead)
    """What reads the events of batches that this process applies itself (`pipelines.silver.in_process`)."""
    typer: DocumentTyper = field(init=False)
    """What types the documents of such batches."""

    def __post_init__(self) -> None:
        self.typer = DocumentTyper(self.options)
        self.bronze_columns = reduce.needed(self.options.unwrap)
        self._always_keeps_document = self.keeps_document

    @property
    def mode(self) -> unwrap_options.DeleteMode:
        """What a delete does."""
        return self.options.unwrap.delete_tombstone_handling_mode

    @property
    def quarantine(self) -> tables.TableRef:
        """The table of its events that cannot be read."""
        return self.layout.quarantine(*self.namespace)

    @property
    def deletes(self) -> tables.TableRef:
        """The table of its remembered deletes, which is made with the first of them."""
        return self.layout.deletes(*self.namespace)

    def rows(self) -> DataFrame:
        """The table as it is now. Not kept: a DataFrame goes on with the columns and files that it was made with."""
        return self.spark.table(str(self.writer.table))

    def events(self, span: BatchRange) -> DataFrame:
        """Its events in a span of bronze's batches, in no order."""
        return survey.events(self.spark, self.bronze, self.namespace, span)

    def keep_documents(self, position: registry.SilverPosition, span: BatchRange) -> None:
        """Decide of the work at hand whether whole documents are kept. Where another capture mode has just ended, updates without
        documents may come still, and rows at this `position` have what to fold them onto."""
        is_due = self.options.keep_document is None and position.documents is True
        self.keeps_document = self._always_keeps_document or (
            is_due and collection_events.has_partial(self.spark, self.bronze, self.namespace, span, is_last=False)
        )

    def is_empty(self) -> bool:
        """Whether the table was never written: then its first rows are appended, there is nothing to merge with."""
        # `is_new` alone does not say it: a table that a repair set back to batch 0 has rows, and its commits say so.
        return self.is_new and self.writer.metadata.get("to") is None

    def added(self, schema: document_schema.DocumentSchema) -> tuple[reduce.AddedColumn, ...]:
        """The columns that `add.fields` and `add.headers` ask for, beside those of a schema's documents."""
        return reduce.added(self.options.unwrap, documents=(name for name, _ in schema.table()), earlier=self.reserved)

    def shows_deleted(self, counts: survey.EventCounts) -> bool:
        """Whether deleted documents stay in the table, and some are deleted."""
        return counts.deletes > 0 and self.mode.marks_deleted

    def move(self, next_position: registry.SilverPosition) -> None:
        """Only the position moves: an empty commit."""
        self.writer.mark(to=next_position.to, extra=self.said(next_position))

    def said(self, position: registry.SilverPosition) -> dict[str, object]:
        """What a commit with this position says beside `to`."""
        return replace(position, deletes=self.remembered).extra


@dataclass(frozen=True)
class CollectionWork:
    """What one collection's table lacks: the events and sweeps between its position and the batch `to`."""

    namespace: registry.Namespace
    position: registry.SilverPosition
    to: int
    counts: survey.EventCounts
    sweeps: tuple[Sweep, ...] = ()

    @property
    def span(self) -> BatchRange:
        """The batches to apply."""
        return BatchRange(self.position.to, self.to)
