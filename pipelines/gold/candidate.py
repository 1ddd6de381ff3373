"""A version of a gold table before it is published, as the audit sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from cdc_core.tables import layout as tables


@dataclass(frozen=True)
class Candidate:
    """The rows that a table is about to have; readers see none of them yet.

    `name` is the collection or the model, `whole` makes the table as it would be, `changed` those of its rows that the
    last good version does not have (None where that is not known), `keys` the columns that name a row. `live` is what
    the metadata of the last good version's commit says. Both frames give the rows that are then published: they are
    computed already, or are functions of versions of tables.
    """

    name: str
    table: tables.TableRef
    whole: Callable[[], DataFrame]
    changed: DataFrame | None = None
    keys: tuple[str, ...] = ()
    live: Mapping[str, object] = field(default_factory=dict)


class Audit(Protocol):
    """Judges a candidate before it is published, and returns what the commit is to hold of the result.

    Raises `GateFailed` to keep the last good version.
    """

    def __call__(self, spark: SparkSession, candidate: Candidate) -> Mapping[str, object]: ...

    def judges(self, name: str) -> bool:
        """Whether anything is expected of the candidates of this name."""


class NoAudit:
    """The audit of tables without expectations."""

    def __call__(self, spark: SparkSession, candidate: Candidate) -> Mapping[str, object]:
        return {}

    def judges(self, name: str) -> bool:
        return False


no_audit = NoAudit()
