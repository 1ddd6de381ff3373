"""The MongoDB deployment that a run captures, and which of its collections."""

from __future__ import annotations

from dataclasses import dataclass

from cdc_core import errors
from cdc_core.properties.source import LimitAction, Source
from cdc_core.stream import filters
from pipelines.capture.logger import log
from pipelines.mongodb import catalog, change_stream
from pipelines.mongodb import client as mongodb
from pipelines.mongodb import connection as connections

NARROW = "narrow collection.include.list or raise the limit"


def is_over_limit(source: Source, captured: int) -> bool:
    """Whether so many collections are more than `guardrail.collections.max` lets in."""
    return 0 < source.guardrail_collections_max < captured


@dataclass(frozen=True)
class Deployment:
    """The source of the settings with a client of it; `filter` says what is captured, read for signals and snapshotted."""

    source: Source
    connection: connections.Connection
    client: mongodb.Client
    filter: filters.Filter

    @staticmethod
    def of(source: Source, connection: connections.Connection, client: mongodb.Client) -> Deployment:
        return Deployment(source, connection, client, filters.of(source))

    def collections(self) -> list[catalog.SourceCollection]:
        """The collections that are captured and exist now."""
        return connections.captured(self.source, self.client, is_begun=True)

    def check_collections(self) -> None:
        """Raise `SourceUnsuitable` where the settings name something that cannot be captured: at a first start."""
        connections.captured(self.source, self.client)

    def namespaces(self) -> list[str]:
        """The names of the collections that are captured and exist now, each as ``database.collection``."""
        return [each.namespace for each in self.collections()]

    def check_guardrail(self, captured: int) -> None:
        """`guardrail.collections.max`: warn or stop where more collections are captured."""
        if not is_over_limit(self.source, captured):
            return
        message = (
            f"source.guardrail.collections.max: {captured} collections are captured, the limit is "
            f"{self.source.guardrail_collections_max}; {NARROW}"
        )
        match self.source.guardrail_collections_limit_action:
            case LimitAction.WARN:
                log.warning(message)
            case LimitAction.FAIL:
                raise errors.SourceUnsuitable(message)

    def stream_options(self) -> change_stream.StreamOptions:
        """What a change stream is opened with now: databases are looked up as they are spelled on the server."""
        return connections.stream_options(self.source, self.client)
