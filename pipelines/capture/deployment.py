"""The MongoDB deployment that a run captures, and the collections it captures there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cdc_core import errors
from cdc_core.properties.source import LimitAction, Source
from cdc_core.settings.parse import Settings
from cdc_core.stream import filters
from pipelines.capture.logger import log
from pipelines.delta import tables as delta
from pipelines.mongodb import catalog, change_stream
from pipelines.mongodb import client as mongodb
from pipelines.mongodb import connection as connections

NARROW = "narrow collection.include.list or raise the limit"


def is_over_limit(source: Source, captured: int) -> bool:
    """Whether the number of captured collections exceeds `guardrail.collections.max` (0: no limit)."""
    return 0 < source.guardrail_collections_max < captured


class SharedPlace(NamedTuple):
    """Two tables that would be one, and what to do."""

    found: str
    mend: str


def shared_places(settings: Settings, collections: Sequence[catalog.SourceCollection]) -> Iterator[SharedPlace]:
    """The collections that would have the table of another one, or their history there."""
    layout = delta.layout(settings.lakehouse)
    collisions = layout.collisions([(collection.db, collection.name) for collection in collections])
    for first, second, table in collisions:
        mend = "remove one of them from the include list, or use another pipeline with its own schema_prefix"
        yield SharedPlace(f"{first} and {second} would both become the table {table}", mend)
    owners = {layout.gold(each.db, each.name).key: each.namespace for each in collections}
    for each in collections:
        owner = owners.get(layout.history(each.db, each.name).key)
        if owner and settings.silver.for_collection(each.namespace).history:
            found = f"the history of {each.namespace} would be in the same place as the table of the collection {owner}"
            yield SharedPlace(found, "remove one of them from the include list, or switch history off")


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

    def check_tables(self, settings: Settings) -> None:
        """Raise `SourceUnsuitable` where two tables of captured collections would be one: at a first start."""
        problems = [f"{found}; {mend}" for found, mend in shared_places(settings, self.collections())]
        if problems:
            raise errors.SourceUnsuitable("\n".join(problems))

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
