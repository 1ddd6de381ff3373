"""Which events of the stream become rows, which are signals, and what of a document is left out of its row."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from cdc_core.bronze import event_rows as events
from cdc_core.properties.source import PipelineOrder, SignalChannel, Source
from cdc_core.stream import fields as field_filters
from cdc_core.stream import filters

OfCollection = Callable[[str, str], bool]
"""``(database, collection) -> whether``."""


@dataclass(frozen=True)
class Selection:
    """The settings' filters as the encoder applies them.

    `includes` is None where the server lets nothing else through: then nothing is looked at twice. `skipped` are
    operation types that come for the collection of signals alone, and get no row.
    """

    includes: OfCollection | None
    is_signal_collection: OfCollection | None
    fields: events.FieldsOf | None
    skipped: frozenset[str] = frozenset()

    @staticmethod
    def of(source: Source, chosen: filters.Filter) -> Selection:
        is_alone = PipelineOrder.USER_ONLY is source.cursor_pipeline_order
        has_more = is_alone or chosen.left_to_client() or chosen.signals
        reads_signals = SignalChannel.SOURCE in source.signal_enabled_channels and chosen.signals
        listed = field_filters.read(source.field_exclude_list, source.field_renames)
        return Selection(
            # Patterns are matched once a collection, and not once an event.
            includes=functools.lru_cache(maxsize=10_000)(chosen.includes) if has_more else None,
            is_signal_collection=chosen.is_signals if reads_signals else None,
            fields=functools.lru_cache(maxsize=10_000)(listed.of) if listed.entries else None,
            skipped=filters.OPERATIONS - filters.operations(source) if reads_signals and not is_alone else frozenset(),
        )
