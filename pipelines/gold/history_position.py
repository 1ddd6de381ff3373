"""The position of a history, as its commits have it, and whether it is due.

For tables of documents, and rebuilds of silver: `pipelines.gold.current.GoldWork`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pyspark.sql import SparkSession

from cdc_core import errors
from cdc_core.tables import layout as tables
from pipelines.bronze import registry
from pipelines.delta import table_history
from pipelines.gold import current

GAP = "gap"
"""`HistoryPosition.has_gap` in the metadata of commits."""


@dataclass(frozen=True)
class HistoryPosition:
    """The position of a history: applied up to the batch `to` of the bronze `log`; events before the sequence `floor` are refused.

    `added` are the columns that `add.fields` and `add.headers` ever made. `has_gap`: bronze may lack events after `to`, because maintenance
    removed some while no history was kept, or because the table was repaired. `folds`: whether partial updates were folded, and documents
    kept for that, of all versions; None if unknown. `bronze` is as in silver's position.
    """

    to: int = 0
    floor: str = ""
    log: str | None = None
    added: tuple[str, ...] = ()
    has_gap: bool = False
    folds: bool | None = None
    bronze: registry.BronzeCommit | None = None

    def start(self, silver: registry.SilverPosition, *, folds: bool) -> int:
        """The batch after which events are applied: 0 if batches have other numbers now, or if updates that were left incomplete are to be
        folded."""
        return 0 if silver.is_of_other(self.log) or (folds and self.folds is False) else self.to

    @property
    def extra(self) -> dict[str, object]:
        """The metadata of a commit with this position, beside `to`."""
        entries = {"floor": self.floor, "log": self.log, "added": self.added, GAP: self.has_gap, "folds": self.folds}
        return {**entries, "bronze": self.bronze}

    def of_the_same_rows(self, metadata: Mapping[str, object]) -> dict[str, object]:
        """The same for a commit without rows after one with the metadata `metadata`: models need not be made again."""
        return {**self.extra, current.ROWS: current.rows_of(metadata)}


def position(spark: SparkSession, table: tables.TableRef) -> HistoryPosition:
    """The position of a history's table; the initial one if there is no such table."""
    metadata = table_history.standing(spark, table).metadata
    entries = metadata if is_history(metadata) else {}
    return HistoryPosition(
        entries.get("to") or 0,
        entries.get("floor") or "",
        entries.get("log"),
        tuple(entries.get("added") or ()),
        bool(entries.get(GAP)),
        entries.get("folds"),
        registry.bronze_commit(entries),
    )


def is_history(metadata: Mapping[str, object]) -> bool:
    """Whether a commit's metadata is a history's: a collection may have the name of another one's history."""
    return GAP in metadata or "floor" in metadata  # earlier versions wrote only `floor`


def check_free(table: tables.TableRef, metadata: Mapping[str, object], namespace: registry.Namespace) -> None:
    """Raise `DecisionNeeded` if a collection's table would replace a history or a model."""
    if is_history(metadata) or "model" in metadata:
        what = "a history is kept" if is_history(metadata) else "a model is made"
        raise errors.DecisionNeeded(
            f"{table.label}: the table of {namespace} belongs here, but {what} here, or was; remove the collection "
            "from the pipeline, or switch the other one off and remove its table"
        )


def is_due(at: HistoryPosition, silver: registry.SilverPosition) -> bool:
    """Whether silver has applied batches that the history lacks. A rebuild of silver does not count: versions come from bronze."""
    return at.to < silver.to or silver.is_of_other(at.log)
