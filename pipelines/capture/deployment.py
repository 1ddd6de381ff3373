"""The MongoDB deployment that a run captures, and the collections it captures there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cdc_core import errors
from cdc_core.properties.source import LimitAction, Source
from cdc_core.stream import filters
from cdc_core.tables import layout as tables
from pipelines.capture.logger import log
from pipelines.mongodb import catalog, change_stream
from pipelines.mongodb import client as mongodb
from pipelines.mongodb import connection as connections

APART = "remove one of them from the include list, or use another pipeline with its own schema_prefix"
NARROW = "narrow collection.include.list or raise the limit"


def is_over_limit(source: Source, captured: int) -> bool:
    """Whether the number of captured collections exceeds `guardrail.collections.max` (0: no limit)."""
    return 0 < source.guardrail_collections_max < captured


def same_tables(layout: tables.Layout, collections: Sequence[catalog.SourceCollection]) -> list[str]:
    """What is wrong with collections that would have the table of another one."""
    collisions = layout.collisions([(collection.db, collection.name) for collection in collections])
    return [f"{first} and {second} would both become the table {table}" for first, second, table in collisions]


@dataclass(frozen=True)
class Deployment:
    """The source settings with a client; `filter` decides which collections are captured, snapshotted, or hold signals."""

    source: Source
    connection: connections.Connection
    client: mongodb.Client
    filter: filters.Filter

    @staticmethod
    def of(source: Source, connection: connections.Connection, client: mongodb.Client) -> Deployment:
        return Deployment(source, connection, client, filters.of(source))

    def collections(self) -> list[catalog.SourceCollection]:
        """The captured collections that exist now."""
        return connections.captured(self.source, self.client, is_begun=True)

    def check_collections(self) -> None:
        """Raise `SourceUnsuitable` where the settings name a view or time-series collection; for a first start."""
        connections.captured(self.source, self.client)

    def check_tables(self, layout: tables.Layout) -> None:
        """Raise `SourceUnsuitable` where two captured collections would have one table: at a first start."""
        if layout.root is not None:
            return
        problems = same_tables(layout, self.collections())
        if problems:
            raise errors.SourceUnsuitable("\n".join(f"{problem}; {APART}" for problem in problems))

    def namespaces(self) -> list[str]:
        """The captured collections that exist now, as ``database.collection``."""
        return [each.namespace for each in self.collections()]

    def check_guardrail(self, captured: int) -> None:
        """Warn or raise `SourceUnsuitable` where more collections are captured than `guardrail.collections.max`."""
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
        """The options of the change stream, with databases as they are spelled on the server now."""
        return connections.stream_options(self.source, self.client)
