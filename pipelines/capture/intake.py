"""The events for the encoder: whole, and not in bronze yet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cdc_core import errors
from cdc_core.properties.source import OversizeMode, Source
from cdc_core.stream import split_events
from pipelines.capture import tokens
from pipelines.mongodb import change_stream


@dataclass
class Intake:
    """Drops events that bronze already holds, and joins events that the server has split.

    A stream that resumes at a cluster time returns all events of that time: those up to `bronze_token` are in bronze.
    `fragments` is None where large events are not split.
    """

    bronze_token: str | None
    fragments: split_events.Fragments | None

    @staticmethod
    def of(source: Source, *, bronze_token: str | None) -> Intake:
        is_split = source.cursor_oversize_handling_mode is OversizeMode.SPLIT
        return Intake(bronze_token, split_events.Fragments() if is_split else None)

    def events(self, batch: change_stream.EventBatch) -> Iterator[bytes]:
        """The events of a batch, as BSON. A split event comes with the batch that holds its last fragment."""
        for raw in batch.events:
            if self.bronze_token is not None:
                if tokens.is_at_or_before(raw, self.bronze_token):
                    continue
                self.bronze_token = None  # Tokens sort in stream order: no later event is in bronze.
            event = raw if self.fragments is None else self._whole(self.fragments, raw)
            if event is not None:
                yield event

    @staticmethod
    def _whole(fragments: split_events.Fragments, raw: bytes) -> bytes | None:
        try:
            return fragments.whole(raw)
        except split_events.MissingFragment as error:
            # After a reconnect a stage of cursor.pipeline may hide the other fragments, because the document is looked up
            # again. The run restarts after the last whole event.
            raise errors.SourceUnreachable(
                "reading the change stream: a large event arrived incomplete; reading it again"
            ) from error
