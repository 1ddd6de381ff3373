"""Splits a range's events in this process where some cannot be read or have to wait: `quarantine_table.applicable` without a query."""

from __future__ import annotations

from collections.abc import Collection

import pyarrow as pa
import pyarrow.compute as pc

from cdc_core.bronze import columns as bronze
from cdc_core.bronze.batch_range import BatchRange
from cdc_core.silver import quarantine_split
from pipelines.delta import live_files, table_schema, upsert
from pipelines.silver import in_process_fold
from pipelines.silver.batch import NeedsSteps
from pipelines.silver.collection import SilverCollection


def split(
    collection: SilverCollection,
    live: live_files.LiveFiles,
    events: pa.Table,
    range_: BatchRange,
    *,
    waiting_keys: Collection[str],
) -> quarantine_split.LocalSplit:
    """A range's events, which have all of bronze's columns, split; `waiting_keys` are keys with an event in quarantine.

    Raises `NeedsSteps` if there is nothing to split, or what is needed is too large.
    """

    def stored(keys: Collection[str]) -> dict[str, str]:
        columns = (upsert.KEY, "__known", "__sequence")
        rows = in_process_fold.rows_of(live, [*keys], columns)
        return dict(zip(rows[upsert.KEY].to_pylist(), pc.coalesce(rows["__known"], rows["__sequence"]).to_pylist()))

    try:
        bronze_events = table_schema.conformed(events, bronze.SCHEMA)
        waiting = _waiting(collection, [*{*waiting_keys}.intersection(events["key"].to_pylist())], range_)
        found = quarantine_split.split(bronze_events, waiting=waiting, stored=stored, to=range_.to)
    except table_schema.NotReadable as error:
        raise NeedsSteps from error
    if found is None:
        raise NeedsSteps
    return found


def _waiting(collection: SilverCollection, keys: Collection[str], range_: BatchRange) -> pa.Table:
    """The events in quarantine that belong to these documents."""
    if not keys:
        return quarantine_split.SCHEMA.empty_table()
    assert collection.quarantined is not None  # it gave the keys
    waiting = collection.quarantined.waiting(keys, before=range_.after)
    if waiting is None:
        raise NeedsSteps
    return waiting
