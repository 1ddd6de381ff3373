"""Silver's position moved back, where an older copy of the files of bronze, or of the remembered deletes, was restored.

Silver may have applied batches that this bronze no longer has. The capture reads their events again, into batches that reuse their
numbers. So the position becomes that of silver's last commit that names a commit of bronze which bronze's log still has. Deletes that are
no longer remembered leave no trace in silver, and gold would never hear of them: the position becomes the last batch of which some are.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from cdc_core.tables import layout as tables
from pipelines.bronze import log as bronze_log
from pipelines.bronze import registry
from pipelines.delta import table_history
from pipelines.delta.writer import Writer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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
    """Put the table's position back, by a commit of its own; to the beginning where its history no longer reaches back so far.

    The rows stay: what comes again is compared with them by `sequence`. Their new `origin` makes gold write its table anew, for
    some of them may get the numbers of batches that gold has published. Raises as `Writer.claim`.
    """

    def shared_batch() -> int:
        shared = table_history.last_commit(spark, table, saying=lambda said: _is_shared(spark, bronze, said))
        return ((shared.metadata or {}).get("to") or 0) if shared is not None else 0

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
    """Put the table's position back to the last batch of which `deletes` are remembered, which are then remembered again; as
    `to_common_batch`."""
    with Writer.claim(spark, table, take_over=take_over, since_ms=since_ms).released() as writer:
        position = registry.silver_position(spark, table)
        to = min(position.to, registry.remembered_to(spark, deletes))
        _mark(writer, deletes, replace(position, to=to, deletes=registry.deletes_version(deletes)))


def _mark(writer: Writer, older: tables.TableRef, position: registry.SilverPosition) -> None:
    label = writer.table.label
    log.warning(
        "%s: an older copy of %s was restored; applying everything after batch %d again", label, older.label, position.to
    )
    writer.mark(to=position.to, extra=replace(position, origin=uuid.uuid4().hex[:12]).extra)


def _is_shared(spark: SparkSession, bronze: tables.TableRef, said: Mapping[str, object]) -> bool:
    """Whether a commit names one of this bronze; one that is older than bronze's log is from before both were copied."""
    named = registry.bronze_commit(said)
    return named is not None and bronze_log.is_held(spark, bronze, named) is not False
