"""Rebuilds one table beside the live one, and swaps it in.

A silver table is rebuilt from bronze (`pipelines.silver.rebuild`), a gold table from the current silver table, its only input. The
table is claimed first, so that nobody else writes it; a refused rebuild has changed nothing.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace

from pyspark.sql import SparkSession

from cdc_core import errors
from cdc_core.settings.parse import Settings
from cdc_core.tables.layout import Layer
from pipelines.bronze import registry
from pipelines.delta import table_comparison
from pipelines.delta import tables as delta
from pipelines.delta.writer import Writer
from pipelines.gold import current, expectations, history_position
from pipelines.silver import rebuild as silver_rebuild
from pipelines.silver.rebuild import RebuildResult


def run(
    spark: SparkSession,
    settings: Settings,
    *,
    collection: str,
    layer: Layer = Layer.SILVER,
    take_over: bool = False,
    is_trial: bool = False,
    drops_lost: bool = False,
    stop: threading.Event | None = None,
) -> RebuildResult:
    """Rebuild the table of `database.collection`; with `is_trial` only compare.

    Does not swap if rows would be lost without a delete in bronze, unless `drops_lost` is set: `silver.rebuild.refuse` then raises.

    Raises `SettingsError` for an unknown collection, `GateFailed` if a gold table's rows do not meet their expectations,
    `DecisionNeeded` if bronze has neither its first batch nor a whole snapshot, or silver has applied nothing that gold could show,
    `TableOwned`, `LeaseHeld`, `OwnershipLost`, and `Temporary` when `stop` was set. The table is then unchanged.
    """
    if layer is Layer.BRONZE:
        raise errors.SettingsError(errors.Problem("--layer", "bronze is the log itself", "silver is rebuilt from it"))
    started = time.monotonic()
    layout = delta.layout(settings.lakehouse)
    [namespace] = registry.chosen(spark, settings, collection)
    table = layout.silver(*namespace) if layer is Layer.SILVER else layout.gold(*namespace)
    if not delta.exists(spark, table):
        raise errors.DecisionNeeded(f"{table.label}: there is no such table yet; medallion {layer.value} makes it")
    with Writer.claim(spark, table, take_over=take_over).released() as writer:
        if layer is Layer.GOLD:
            result = _gold(spark, settings, namespace, writer, is_trial=is_trial)
        else:
            args = (spark, settings, layout, namespace, writer, is_trial, drops_lost, stop or threading.Event())
            result = silver_rebuild.SilverRebuild(*args).run()
    return replace(result, seconds=time.monotonic() - started)


def _gold(
    spark: SparkSession, settings: Settings, namespace: registry.Namespace, writer: Writer, *, is_trial: bool
) -> RebuildResult:
    """Rebuild the gold table from the current silver table."""
    history_position.check_free(writer.table, writer.metadata, namespace)
    audit = expectations.Gate.of(settings)
    table = current.at_silver(spark, delta.layout(settings.lakehouse), namespace, audit=audit)
    silver = table.work.silver
    why = current.why_it_waits(silver, writer.metadata.get("to"))
    if not silver.to or why:  # silver was removed, repaired or restored: readers keep what they have
        why = why or "nothing has been applied yet, so gold stays as it was"
        raise errors.DecisionNeeded(f"{table.silver.label}: {why}; run medallion silver first")
    comparison = table_comparison.compared(spark.table(str(writer.table)), table.documents())
    if not is_trial:
        table.rewritten(writer, extra={current.REBUILT: writer.identity.writer})
    version = None if is_trial else writer.version
    return RebuildResult(str(namespace), Layer.GOLD, writer.table.label, table.work.silver.to, comparison, (), version)
