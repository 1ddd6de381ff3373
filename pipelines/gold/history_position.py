"""Where a history stands: what its commits say of it, and what that makes due.

What a rebuild of silver makes due in a table of documents is said in `pipelines.gold.current.GoldWork`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cdc_core import errors
from pipelines.bronze import registry
from pipelines.delta import table_history
from pipelines.gold import current

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cdc_core.tables import layout as tables

GAP = "gap"
"""What a commit says of `HistoryPosition.has_gap`."""


@dataclass(frozen=True)
class HistoryPosition:
    """Where a history stands: up to `to`, a batch of the bronze called `log`; nothing from before `floor` may come any more.

    `added` are the columns that `add.fields` and `add.headers` ever made. `has_gap`: what came after `to` is not all in bronze any more,
    because maintenance took from it while no history was kept; or that may be so, because the table was repaired. `folds`: whether updates
    that say only what changed were folded, and whole documents kept for them; None where nothing says so. `bronze` is as in silver's position.
    """

    to: int = 0
    floor: str = ""
    log: str | None = None
    added: tuple[str, ...] = ()
    has_gap: bool = False
    folds: bool | None = None
    bronze: registry.BronzeCommit | None = None

    def start(self, silver: registry.SilverPosition, *, folds: bool) -> int:
        """The batch behind which events are laid out: all of them once more where they have other numbers, or where updates were left
        incomplete that are to be folded now."""
        return 0 if silver.is_of_other(self.log) or (folds and self.folds is False) else self.to

    @property
    def extra(self) -> dict[str, object]:
        """What a commit says beside `to`."""
        own = {"floor": self.floor, "log": self.log, "added": self.added, GAP: self.has_gap, "folds": self.folds}
        return {**own, "bronze": self.bronze}

    def of_the_same_rows(self, held: Mapping[str, object]) -> dict[str, object]:
        """The same for a commit without rows, behind one that says what is `held`: what is made of the versions stays."""
        return {**self.extra, current.ROWS: current.rows_of(held)}


def position(spark: SparkSession, table: tables.TableRef) -> HistoryPosition:
    """Where a history's table stands; at the beginning where there is none."""
    said = table_history.standing(spark, table).said
    found = said if is_history(said) else {}
    return HistoryPosition(
        found.get("to") or 0,
        found.get("floor") or "",
        found.get("log"),
        tuple(found.get("added") or ()),
        bool(found.get(GAP)),
        found.get("folds"),
        registry.bronze_commit(found),
    )


def is_history(metadata: Mapping[str, object]) -> bool:
    """Whether this is what a history's commits say: a collection may be called as the history of another one."""
    return GAP in metadata or "floor" in metadata  # as those of before there were gaps


def spare(table: tables.TableRef, metadata: Mapping[str, object], namespace: registry.Namespace) -> None:
    """Raise `DecisionNeeded` where a collection's table would take the place of a history, or of a model."""
    if is_history(metadata) or "model" in metadata:
        what = "a history is kept" if is_history(metadata) else "a model is made"
        raise errors.DecisionNeeded(
            f"{table.label}: the table of {namespace} belongs here, but {what} here, or was; remove the collection "
            "from the pipeline, or switch the other one off and remove its table"
        )


def is_due(at: HistoryPosition, silver: registry.SilverPosition) -> bool:
    """Whether silver has applied events that the history has not. A rebuild of silver makes nothing due: versions come
    from bronze's events."""
    return at.to < silver.to or silver.is_of_other(at.log)
