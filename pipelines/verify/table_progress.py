"""Whether a table has passed a cluster time, and which keys it cannot have yet. Tables are only read.

A document that was read at T can be compared with its row if the row has all events of its key up to T, and none after T. So three kinds of
keys must wait for a later look: those whose events are not in bronze yet, those whose events are in bronze but not in the table, and those
that changed after T and are in the table already.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from bson.timestamp import Timestamp
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from cdc_core import errors
from cdc_core.bronze.batch_range import BatchRange
from cdc_core.extended_json import keys as canonical_keys
from cdc_core.settings.parse import CollectionSettings
from cdc_core.sql import names
from cdc_core.stream import resume_token
from cdc_core.tables import layout as tables
from cdc_core.tables.layout import Layer
from pipelines.bronze import log as bronze_log
from pipelines.bronze import registry, stream_position, survey
from pipelines.delta import owners, query_execution, table_history
from pipelines.delta import tables as delta
from pipelines.mongodb import client as mongodb
from pipelines.mongodb import document_keys
from pipelines.mongodb import failures as mongodb_failures
from pipelines.verify import bronze_state, documents, table_rows

CAPTURE_SECONDS = 3.0
"""How long to wait for a running capture to pass a time; a quiet one moves only once a minute."""
START_SECONDS = 15.0
"""How long to wait for silver and gold to claim a table beside a running capture."""
PAUSE = 0.3
"""Seconds between two reads of the tables' positions."""
MOST_UNSEEN = 200_000
"""The most changes that bronze may lack; with more it is too far behind for a comparison."""


def position_of(spark: SparkSession, table: tables.TableRef) -> bronze_log.BronzePosition:
    """The position of bronze; raises `DecisionNeeded` if it is empty or has none."""
    position = stream_position.read(spark, table) if delta.exists(spark, table) else None
    if position is None:
        raise errors.DecisionNeeded(f"{table.label}: bronze is empty; run the pipeline first: medallion run --once")
    return position


@dataclass(frozen=True)
class TableProgress:
    """A version of the table (`state`), the batch up to which it is at least applied (`to`), and bronze's last `batch` at that time.

    `unseen` are keys with events that are not in bronze yet. `awaits_sweep`: the table still has to remove rows after a drop, a rename or a
    finished snapshot.
    """

    state: table_rows.TableVersion | bronze_state.BronzeState
    to: int
    batch: int
    unseen: frozenset[str]
    awaits_sweep: bool = False


@dataclass(frozen=True)
class KeyEvents:
    """A key's events in bronze: whether some are not applied to the table, and the sequence of the last one."""

    unapplied: bool
    sequence: str


@dataclass
class TableProgressReader:
    """Reads the progress of one table, and waits until it has passed a cluster time."""

    spark: SparkSession
    client: mongodb.Client
    namespace: registry.Namespace
    layer: Layer
    layout: tables.Layout
    bronze: tables.TableRef
    options: CollectionSettings
    is_stopped: Callable[[], bool] = field(default=lambda: False)

    @property
    def silver(self) -> tables.TableRef:
        """The collection's silver table."""
        return self.layout.silver(*self.namespace)

    @property
    def table(self) -> tables.TableRef:
        """The table that is compared."""
        match self.layer:
            case Layer.BRONZE:
                return self.bronze
            case Layer.SILVER:
                return self.silver
            case Layer.GOLD:
                return self.layout.gold(*self.namespace)

    def newest(self) -> table_rows.TableVersion | bronze_state.BronzeState:
        """The table as it is now."""
        if self.layer is Layer.BRONZE:
            return self._bronze(self.position())
        return table_rows.newest(self.spark, self.table, self.options, silver=self.silver)

    def _bronze(self, batch: int) -> bronze_state.BronzeState:
        version = table_history.version(self.spark, self.bronze)
        return bronze_state.BronzeState(self.spark, self.bronze, self.namespace, batch, version)

    def captures(self) -> bool:
        """Whether a capture writes bronze now."""
        return owners.is_held(self.spark, self.bronze)

    def applies(self) -> bool:
        """Whether the table is being written now. A running pipeline claims a table when there is something to write."""
        return all(owners.is_held(self.spark, each) for each in {self.silver, self.table})

    def past(self, at: documents.Time, *, until: float) -> TableProgress:
        """The table's progress once it has passed the time `at`, or once waiting is useless or `until` (monotonic clock) is over."""
        began = time.monotonic()
        while True:
            position = position_of(self.spark, self.bronze)
            bronze_time = resume_token.position(position.token)
            is_past, is_captured = (bronze_time.seconds, bronze_time.increment) > at, self.captures()
            # Waiting only helps while a capture is running.
            if not is_past and is_captured and self._has_time(min(began + CAPTURE_SECONDS, until)):
                time.sleep(PAUSE)
                continue
            unseen = frozenset() if is_past else self._unseen(position.token, at)
            to = position.batch if self.layer is Layer.BRONZE else self.position()
            # Beside a running capture, silver and gold may be about to claim the table.
            is_unapplied, awaits_sweep = self._unapplied(to, position.batch)
            if is_unapplied:
                end = until if self.applies() else min(began + START_SECONDS, until) if is_captured else 0.0
            else:
                end = until if unseen and is_captured else 0.0
            if self._has_time(end):
                time.sleep(PAUSE)
                continue
            # The position was read before the version: what the version has beyond it counts as not applied, and is looked at again.
            table = self._bronze(to) if self.layer is Layer.BRONZE else self.newest()
            return TableProgress(table, to, position.batch, unseen, awaits_sweep)

    def _has_time(self, until: float) -> bool:
        return time.monotonic() < until and not self.is_stopped()

    def position(self) -> int:
        """The batch up to which the table is at least applied; 0 if its batches are another bronze's, or it is ahead of its silver table, from
        which it will be rewritten."""
        if self.layer is Layer.BRONZE:
            return position_of(self.spark, self.bronze).batch
        to = table_history.standing(self.spark, self.table).metadata.get("to")
        # After the table's own position, which silver's is never behind. Gold does not name the bronze log: it follows silver.
        silver = registry.silver_position(self.spark, self.silver)
        is_of_other = silver.is_of_other(bronze_log.newest(self.spark, self.bronze).log)
        return to if isinstance(to, int) and to <= silver.to and not is_of_other else 0

    def generation(self) -> str:
        """The generation of silver's rows from which the table was made."""
        if self.layer is Layer.SILVER:
            return registry.silver_position(self.spark, self.silver).generation
        return table_history.standing(self.spark, self.table).metadata.get("generation") or ""

    def columns(self, progress: TableProgress | None = None) -> StructType:
        """The table's columns, at this progress or now."""
        rows = (
            progress.state.current()
            if progress is not None and isinstance(progress.state, table_rows.TableVersion)
            else None
        )
        return delta.column_types(self.spark, self.table) if rows is None else rows.schema

    def _unseen(self, token: str, at: documents.Time) -> frozenset[str]:
        """The keys that the source changed up to the time, after bronze's position."""
        name = str(self.namespace)
        try:
            raw_keys = document_keys.changed_keys(
                self.client,
                self.namespace.db,
                self.namespace.collection,
                behind=token,
                until=Timestamp(*at),
                limit=MOST_UNSEEN,
            )
        except mongodb_failures.HistoryLost:
            raise errors.PositionLost(
                f"verifying {name}: the oplog no longer holds bronze's position, so it is unknown which changes bronze "
                "lacks; start the capture first, it says what to do"
            ) from None
        except document_keys.NamespaceGone:
            raise errors.Temporary(
                f"verifying {name}: it was dropped, renamed or replaced, which is not in bronze yet; let the pipeline "
                "catch up and try again"
            ) from None
        # The list is cut there: keys beyond it would be judged as if they had not changed.
        if len(raw_keys) >= MOST_UNSEEN:
            raise errors.Temporary(
                f"verifying {name}: bronze lacks more than {MOST_UNSEEN:,} changes; let the capture catch up first"
            )
        return frozenset(map(canonical_keys.canonical_raw, raw_keys))

    def _unapplied(self, to: int, batch: int) -> tuple[bool, bool]:
        """Whether the table lacks events or sweeps of bronze's batches up to `batch`, and whether it lacks sweeps."""
        if to >= batch:
            return False, False
        counts, sweeps = survey.surveyed(self.spark, self.bronze, BatchRange(to, batch), only=self.namespace)
        is_sweep = bool(survey.sweeps_to_apply(sweeps, self.options))
        return is_sweep or self.namespace in counts, is_sweep

    def moved(
        self, progress: TableProgress, keys: Collection[str], *, since: documents.Time, first: int
    ) -> dict[str, KeyEvents]:
        """The events of these keys that are later than `since`, or not applied to the table.

        Batches up to `first` have no events later than `since`, and are only read for unapplied ones.
        """
        if not keys:
            return {}
        # The sequence of a snapshot's row: changes at `since` itself are in the read.
        last_sequence = names.literal(resume_token.snapshot_sequence(*since))
        events = self.spark.sql(
            f"SELECT key, batch, sequence FROM {self.bronze} WHERE batch > {min(first, progress.to)} "
            f"AND {bronze_log.DOCUMENT_EVENTS} AND {self.namespace.predicate} "
            f"AND (batch > {progress.to} OR sequence > {last_sequence})"
        )
        key_events = (
            query_execution.with_values(events, "key", keys)
            .groupBy("key")
            .agg(
                F.bool_or(F.col("batch") > progress.to).alias("unapplied"),
                F.coalesce(F.max("sequence"), F.lit("")).alias("sequence"),
            )
        )
        return {row.key: KeyEvents(row.unapplied, row.sequence) for row in key_events.collect()}
