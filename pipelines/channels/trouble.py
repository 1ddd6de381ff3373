"""A failure that lasts is logged when it begins, and not at each attempt."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

log = logging.getLogger(__name__)


@dataclass
class Trouble:
    """What cannot be done now: logs each kind of reason once, until it can be done again."""

    what: str
    _logged: set[str] = field(default_factory=set)

    def say(self, reason: str, *, kind: str | None = None) -> None:
        """Log the reason, where it is the first one of its kind."""
        kind = reason if kind is None else kind
        if kind not in self._logged:
            self._logged.add(kind)
            log.warning("%s: %s", self.what, reason)

    def is_over(self) -> None:
        """Note that it works again: the next failure is logged."""
        self._logged.clear()
