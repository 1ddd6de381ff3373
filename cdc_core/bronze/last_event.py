"""The last event of the source that bronze holds, by which a start knows the source again.

A position without an event is a mere time, which the server accepts whatever it holds: also after an older copy of its data was
restored, and in another deployment. So each commit whose position is such a time carries the token of the last event before it.

A position may also be an event that the stream does not have: of another filter, before the first event of the new one. Its commits
carry it as forgotten, so that no start looks for it in vain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cdc_core.stream import resume_token

NAME = "event"
"""Its name in the metadata of a commit."""

FORGOTTEN = "forgotten"
"""The name of a forgotten position there."""


@dataclass(frozen=True)
class LastEvent:
    """The token of the last event at or before a position; None where it is unknown.

    `forgotten` is a position whose event is not one of this source, or of this stream.
    """

    token: str | None = None
    forgotten: str | None = None

    @staticmethod
    def of(metadata: Mapping[str, Any], position: str | None) -> LastEvent:
        """The last event of a commit."""
        return LastEvent(metadata.get(NAME), metadata.get(FORGOTTEN)).at(position)

    def at(self, position: str | None) -> LastEvent:
        """The last event at a later position."""
        if position is None or position == self.forgotten or resume_token.resumes_alone(position):
            return self
        return LastEvent(position)

    def metadata(self, position: str) -> dict[str, object]:
        """The metadata of a commit at this position."""
        last: dict[str, object] = {} if self.token in (None, position) else {NAME: self.token}
        return last | ({FORGOTTEN: position} if self.is_forgotten(position) else {})

    def is_forgotten(self, position: str | None) -> bool:
        """Whether a position is an event that this stream may not have."""
        return position is not None and position == self.forgotten and not resume_token.resumes_alone(position)
