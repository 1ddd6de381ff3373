"""Explains differences that are no errors: by the settings, silver's marks, quarantine, or a snapshot that is still running."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from cdc_core.bronze.batch_range import BatchRange
from cdc_core.properties.source import Operation, SnapshotMode
from cdc_core.settings.parse import OnGone, Settings
from cdc_core.snapshot import key_filter
from cdc_core.snapshot import mode as snapshot_mode
from cdc_core.snapshot import state as snapshot_state
from cdc_core.sql.names import literal
from cdc_core.tables.layout import Layer
from pipelines.bronze import log as bronze_log
from pipelines.bronze import quarantine_table, survey
from pipelines.delta import query_execution
from pipelines.delta import tables as delta
from pipelines.verify import table_progress
from pipelines.verify.result import KeyDifference, KeyVerdict


@dataclass(frozen=True)
class Explanations:
    """Explains one collection's differences; `has_source` is whether the source has the collection."""

    settings: Settings
    progress: table_progress.TableProgressReader
    has_source: bool

    def explained(self, key_differences: Sequence[KeyDifference]) -> list[KeyDifference]:
        """The same differences, with `KEPT`, `QUARANTINED`, `INCOMPLETE` or `WAITING` as their kind if that explains them."""
        wrong_keys = [each.key for each in key_differences if each.kind.is_wrong]
        if not wrong_keys:
            return list(key_differences)
        incomplete, quarantined = (
            self._in_silver(wrong_keys, "coalesce(`__incomplete`, false)"),
            self._quarantined(wrong_keys),
        )
        # Only if something is wrong: each of these reads bronze or silver.
        is_kept, is_unread = self.keeps_rows(), self._is_being_read()
        dropped_keys = set() if is_kept else self._in_silver(wrong_keys, self._left_by_a_drop())
        differences = []
        for difference in key_differences:
            kind = difference.kind
            # A row with another key was no document's, which the settings could keep.
            if (
                kind is KeyVerdict.EXTRA
                and (is_kept or difference.key in dropped_keys)
                and key_filter.is_key(difference.key)
            ):
                kind = KeyVerdict.KEPT
            elif kind.is_wrong and difference.key in quarantined:
                kind = KeyVerdict.QUARANTINED
            elif kind.is_wrong and difference.key in incomplete:
                kind = KeyVerdict.INCOMPLETE
            elif kind.is_wrong and is_unread:
                kind = KeyVerdict.WAITING
            differences.append(replace(difference, kind=kind))
        return differences

    def keeps_rows(self) -> bool:
        """Whether the settings keep the rows of documents that are gone."""
        skips = Operation.DELETE in self.settings.source.skipped_operations
        if self.progress.layer is Layer.BRONZE:  # options of silver do not change bronze
            return skips
        options = self.progress.options
        is_dropped = not self.has_source and OnGone.KEEP in (options.on_drop, options.on_rename)
        return options.unwrap.delete_tombstone_handling_mode.keeps_row or is_dropped or skips

    def _left_by_a_drop(self) -> str:
        """SQL for the rows of silver from before a drop or rename after which the settings keep them; the collection was created again."""
        options = self.progress.options
        if OnGone.KEEP not in (options.on_drop, options.on_rename):
            return "false"
        spark, bronze = self.progress.spark, self.progress.bronze
        span = BatchRange(0, table_progress.position_of(spark, bronze).batch)
        sweeps = survey.sweeps(spark, bronze, span, among=[self.progress.namespace])
        kept_sweeps = {*sweeps} - {*survey.sweeps_to_apply(sweeps, options)}
        return f"`__sequence` < {literal(max((each.first for each in kept_sweeps), default=''))}"

    def _in_silver(self, keys: Iterable[str], where: str) -> set[str]:
        """Those of the keys whose rows in silver satisfy `where`."""
        table = self.progress.silver
        if where == "false" or self.progress.layer is Layer.BRONZE or not delta.exists(self.progress.spark, table):
            return set()
        rows = self.progress.spark.table(str(table)).where(where).select("__key")
        return {row["__key"] for row in query_execution.with_values(rows, "__key", keys).collect()}

    def _quarantined(self, keys: Sequence[str]) -> set[str]:
        """Those of the keys with events in quarantine; read once, as it may have a million events and this is called for each slice."""
        spark, table = self.progress.spark, self.progress.layout.quarantine(*self.progress.namespace)
        if not delta.exists(spark, table):
            return set()
        held_keys = None if self._held_events is None else self._held_events.keys()
        return quarantine_table.held_among(spark, table, keys) if held_keys is None else set(held_keys.intersection(keys))

    @functools.cached_property
    def _held_events(self) -> quarantine_table.HeldEvents | None:
        return quarantine_table.HeldEvents.of(self.progress.spark, self.progress.layout.quarantine(*self.progress.namespace))

    def _is_being_read(self) -> bool:
        """Whether a snapshot of the whole collection is unfinished and will continue by itself: the table may have older rows until
        then."""
        name, source = str(self.progress.namespace), self.settings.source
        states = snapshot_state.states(bronze_log.snapshot_heartbeats(self.progress.spark, self.progress.bronze))
        # The decision of a custom snapshotter class is not known here.
        is_custom = source.snapshot_mode is SnapshotMode.CUSTOM
        stays = {
            snapshot_state.SnapshotKind.INITIAL: not is_custom
            and not snapshot_mode.decided(source, has_position=True, is_unfinished=True).resumes,
            # A pause stops all of them.
            snapshot_state.SnapshotKind.INCREMENTAL: any(each.is_paused and not each.is_done for each in states),
        }
        return any(
            name in state.missing and name not in state.conditions and not stays.get(state.kind, False) for state in states
        )
