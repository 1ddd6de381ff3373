"""The gold tables that a run has claimed."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

from pyspark.sql import SparkSession

from cdc_core.tables import definition
from cdc_core.tables import layout as tables
from pipelines import clock
from pipelines.delta import maintenance
from pipelines.delta.writer import Writer


@dataclass
class TableClaims:
    """The gold tables that this run has claimed, each from its first write to the end of the run."""

    take_over: bool
    deletion_vectors: bool | None
    _writers: dict[tables.TableRef, Writer] = field(default_factory=dict)
    _began_ms: int = field(default_factory=clock.now_ms)
    """`take_over` covers owners at this time only: a service may claim a table for the first time weeks later."""

    def __contains__(self, table: tables.TableRef) -> bool:
        return table in self._writers

    def writer(self, spark: SparkSession, table: tables.TableRef) -> Writer:
        """The writer of a table, which is claimed if it is not yet."""
        writer = self._writers.get(table)
        if writer is None:
            writer = Writer.claim(spark, table, take_over=self.take_over, since_ms=self._began_ms)
            self._writers[table] = writer
            if self.deletion_vectors is not None:
                maintenance.set_deletion_vectors(writer, self.deletion_vectors)
        writer.spark = spark  # tables are published in threads, each with its own session
        return writer

    def table_properties(self) -> dict[str, str]:
        """The properties of a new table for deletion vectors."""
        return {definition.DELETION_VECTORS: "false" if self.deletion_vectors is False else "true"}

    def release(self, spark: SparkSession, table: tables.TableRef) -> None:
        """Release one table, if it is claimed, in the caller's session."""
        writer = self._writers.pop(table, None)
        if writer is not None:
            writer.spark = spark
            _release(writer)

    def close(self) -> None:
        """Release all of them."""
        for writer in self._writers.values():
            _release(writer)
        self._writers.clear()


def _release(writer: Writer) -> None:
    # A claim that another writer took over is not released here, and any other expires by itself.
    with suppress(Exception):
        writer.release()
