"""The result of a verification: a verdict for each key that is not equal, and counts for each collection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from cdc_core.tables.layout import Layer
from cdc_core.verify import equality


class KeyVerdict(StrEnum):
    """The result for one key."""

    EQUAL = "equal"
    MISSING = "missing"
    EXTRA = "extra"
    DIFFERENT = "different"
    WAITING = "waiting"
    """Its last change is not in the table yet."""
    CHANGING = "changing"
    """It changed again before each attempt to judge it."""
    KEPT = "kept"
    """The source has deleted it, or dropped its collection, and the settings keep the row."""
    INCOMPLETE = "incomplete"
    """Its row has partial updates of a document that was never read."""
    QUARANTINED = "quarantined"
    """An event of it could not be applied and is in quarantine."""

    @property
    def is_wrong(self) -> bool:
        """Whether the table differs from the source."""
        return self not in (KeyVerdict.EQUAL, KeyVerdict.KEPT) and not self.is_moving

    @property
    def is_moving(self) -> bool:
        """Whether a later look may give another verdict."""
        return self in (KeyVerdict.WAITING, KeyVerdict.CHANGING)


@dataclass(frozen=True)
class KeyDifference:
    """The verdict on one key, with the differing paths."""

    key: str
    kind: KeyVerdict
    paths: tuple[equality.Difference, ...] = ()


@dataclass(frozen=True)
class CollectionVerification:
    """The result for one collection. `documents` were read from the source; `as_of` is the last cluster time of a read."""

    collection: str
    layer: Layer
    table: str
    version: int | None
    as_of: str
    documents: int
    equal: int
    missing: int = 0
    extra: int = 0
    different: int = 0
    waiting: int = 0
    changing: int = 0
    kept: int = 0
    incomplete: int = 0
    quarantined: int = 0
    unsettled: int = 0
    repaired: int = 0
    is_sample: bool = False
    seconds: float = 0.0
    differences: tuple[KeyDifference, ...] = ()

    @property
    def is_equal(self) -> bool:
        """Whether no document is known to differ, or was left unsettled."""
        return not (self.is_wrong or self.unsettled)

    @property
    def is_judged(self) -> bool:
        """Whether every document that is not changing was judged."""
        return not (self.waiting or self.unsettled)

    @property
    def is_wrong(self) -> bool:
        """Whether the table is known to differ from the source."""
        return bool(self.missing or self.extra or self.different or self.incomplete or self.quarantined)


@dataclass(frozen=True)
class Verification:
    """The result of one run; `failures` are the collections that could not be compared, each with its error."""

    name: str
    layer: Layer
    collections: tuple[CollectionVerification, ...]
    seconds: float
    failures: Mapping[str, Exception] = field(default_factory=dict)

    @property
    def is_equal(self) -> bool:
        """Whether every collection was compared, and is equal."""
        return not self.failures and all(each.is_equal for each in self.collections)

    @property
    def is_judged(self) -> bool:
        """Whether every collection was judged."""
        return not self.failures and all(each.is_judged for each in self.collections)
