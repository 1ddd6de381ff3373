"""What `medallion check` finds."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from cdc_core import errors
from pipelines.mongodb import failures as mongodb_failures


class CheckVerdict(enum.Enum):
    """How severe a finding is."""

    FINE = "fine"
    WARNING = "warning"
    WRONG = "wrong"


@dataclass(frozen=True)
class Finding:
    """One result: its subject, what was found, what to do, and the error that a run would end with."""

    about: str
    verdict: CheckVerdict
    found: str
    mend: str = ""
    error: errors.MedallionError | None = None


def wrong(about: str, error: errors.MedallionError, mend: str = "") -> Finding:
    """The finding of an error."""
    return Finding(about, CheckVerdict.WRONG, str(error).removesuffix(mongodb_failures.WHAT_TO_GRANT), mend, error)
