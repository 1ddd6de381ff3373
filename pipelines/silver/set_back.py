"""Moves silver's position back after an older copy of bronze, or of the remembered deletes, was restored.

Silver may have applied batches that the restored bronze lacks. The capture reads their events again, into batches with the same numbers. So
the position goes back to silver's last commit that names a commit in bronze's log. Deletes that are missing in the restored copy have no
trace in silver, and gold would never see them: the position goes back to the last batch with remembered deletes.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from dataclasses import replace

from pyspark.sql import SparkSession

from cdc_core.tables import layout as tables
from pipelines.bronze import log as bronze_log
from pipelines.bronze import registry
from pipelines.delta import table_history
from pipelines.delta.writer import Writer

log = logging.getLogger(__name__)


def to_common_batch(
    spark: SparkSession,
    table: tables.TableRef,
    bronze: tables.TableRef,
    *,
    newest: registry.BronzeCommit | None,
    take_over: bool,
    since_ms: int | None = None,
) -> None:
    """Move the table's position back by a commit of its own; to batch 0 if its history does not reach back far enough.

    The rows stay: events that come again are compared with them by `sequence`. A new `origin` makes gold rewrite its table, because rows
    may get the numbers of batches that gold has published already. Raises what `Writer.claim` raises.
    """

    def shared_batch() -> int:
        commit = table_history.last_commit(spark, table, matching=lambda metadata: _is_shared(spark, bronze, metadata))
        return ((commit.metadata or {}).get("to") or 0) if commit is not None else 0

    with Writer.claim(spark, table, take_over=take_over, since_ms=since_ms).released() as writer:
        position = registry.silver_position(spark, table)
        _mark(writer, bronze, replace(position, to=min(position.to, shared_batch()), bronze=newest))


def to_remembered_batch(
    spark: SparkSession,
    table: tables.TableRef,
    deletes: tables.TableRef,
    *,
    take_over: bool,
    since_ms: int | None = None,
) -> None:
    """Move the table's position back to the last batch with remembered `deletes`, so that later ones are remembered again; otherwise as
    `to_common_batch`."""
    with Writer.claim(spark, table, take_over=take_over, since_ms=since_ms).released() as writer:
        position = registry.silver_position(spark, table)
        to = min(position.to, registry.remembered_to(spark, deletes))
        # Later sweeps are due again: of the documents that they deleted no other delete may come. All from before them stays late.
        high = None if position.high is None else max(position.high, position.swept)
        version = registry.deletes_version(spark, deletes)
        _mark(writer, deletes, replace(position, to=to, high=high, swept="", deletes=version))


def _mark(writer: Writer, older: tables.TableRef, position: registry.SilverPosition) -> None:
    label = writer.table.label
    log.warning(
        "%s: an older copy of %s was restored; applying everything after batch %d again", label, older.label, position.to
    )
    writer.mark(to=position.to, extra=replace(position, origin=uuid.uuid4().hex[:12]).extra)


def _is_shared(spark: SparkSession, bronze: tables.TableRef, metadata: Mapping[str, object]) -> bool:
    """Whether a commit names a commit of this bronze. One that is older than bronze's log counts as one: it precedes the copy."""
    bronze_commit = registry.bronze_commit(metadata)
    return bronze_commit is not None and bronze_log.is_held(spark, bronze, bronze_commit) is not False
