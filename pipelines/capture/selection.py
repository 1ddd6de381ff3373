"""The filters of the capture: which events become rows, which are signals, and which fields of a document are left out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from cdc_core.bronze import event_rows as events
from cdc_core.properties.source import PipelineOrder, SignalChannel, Source
from cdc_core.stream import fields as field_filters
from cdc_core.stream import filters

OfCollection = Callable[[str, str], bool]
"""``(database, collection) -> bool``."""

CACHED_NAMES = 100_000
"""Collections whose result is kept; with more of them, each event may match the patterns again."""


@dataclass(frozen=True)
class Selection:
    """The settings' filters as the encoder applies them.

    `includes` is None where the server applies all filters. `skipped` are operation types that are read only for the signal
    collection and get no row.
    """

    includes: OfCollection | None
    is_signal_collection: OfCollection | None
    fields: events.FieldsOf | None
    skipped: frozenset[str] = frozenset()

    @staticmethod
    def of(source: Source, source_filter: filters.Filter) -> Selection:
        is_alone = PipelineOrder.USER_ONLY is source.cursor_pipeline_order
        has_more = is_alone or source_filter.left_to_client() or source_filter.signals
        reads_signals = SignalChannel.SOURCE in source.signal_enabled_channels and source_filter.signals
        field_lists = field_filters.read(source.field_exclude_list, source.field_renames)
        return Selection(
            # Cached, so that patterns are matched once per collection and not once per event.
            includes=functools.lru_cache(maxsize=CACHED_NAMES)(source_filter.includes) if has_more else None,
            is_signal_collection=source_filter.is_signals if reads_signals else None,
            fields=functools.lru_cache(maxsize=CACHED_NAMES)(field_lists.of) if field_lists.entries else None,
            skipped=filters.OPERATIONS - filters.operations(source) if reads_signals and not is_alone else frozenset(),
        )
