"""The interface between publishing and the audit: a version of a gold table that is not published yet."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cdc_core.sql.names import identifier

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from cdc_core.tables import layout as tables


@dataclass(frozen=True)
class Candidate:
    """The rows that a table would have; readers do not see them yet.

    `name` is the collection or the model, `whole` returns all rows, with all columns or those of the given names that they have, `changed`
    are those that the last good version lacks (None if unknown; else with all columns), `keys` the columns that identify a row, and `live`
    the metadata of the last good version's commit. Both frames give exactly the rows that are then published: they are computed already, or
    functions of versions of tables.
    """

    name: str
    table: tables.TableRef
    whole: Callable[[Collection[str] | None], DataFrame]
    changed: DataFrame | None = None
    keys: tuple[str, ...] = ()
    live: Mapping[str, object] = field(default_factory=dict)


def selected(rows: DataFrame, names: Collection[str] | None) -> DataFrame:
    """The rows, with all columns or those of these names that they have, as `Candidate.whole` returns them."""
    return rows if names is None else rows.select(*(identifier(name) for name in rows.columns if name in names))


class Audit:
    """Checks a candidate before it is published, and returns metadata for the commit; this one is of tables without expectations.

    Raises `GateFailed` to keep the last good version.
    """

    def __call__(self, spark: SparkSession, candidate: Candidate) -> Mapping[str, object]:
        return {}

    def judges(self, name: str) -> bool:
        """Whether candidates of this name are checked at all."""
        return False


no_audit = Audit()
