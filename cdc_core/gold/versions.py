"""One document's history: its events in order, as versions that begin and end at a `sequence`.

    [ first, next )   from the event that made the version to the next one, or to the document's end
    [ last, … )       open: the current document

The versions are the same whatever the order of events, the number of runs, and repetitions: a key's stored versions are
laid out again together with the new events, and an event that is already there keeps its place.

A partial update is folded onto the version before it. If that is not known (no snapshot, no pre-image, or whole
documents are not kept), the version contains what is known and is incomplete until a whole document comes. A snapshot
read is a version too, changed or not, because an event from before it may still come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from cdc_core.bronze import columns as bronze
from cdc_core.silver import fold
from cdc_core.silver.fold import PartialUpdate
from cdc_core.sql import arrow

EVENT = ("sequence", "offset", "op", "is_whole", "after", "before", "updateDescription")
"""The fields of an event that `event` reads."""

_SCHEMA = pa.schema(
    [
        ("__key", pa.string()),
        ("sequence", pa.string()),
        ("until", pa.string()),
        ("is_incomplete", pa.bool_()),
        ("is_deleted", pa.bool_()),
        ("document", pa.string()),
        ("offset", pa.int64()),
    ]
)

LAID_OUT_DDL = arrow.columns_ddl(_SCHEMA)
"""The columns of `laid_out`."""


_ROWS_AT_A_TIME = 256

_ROW_BYTES = 1000
"""What a version takes in Python's memory beside its document."""


@dataclass(frozen=True)
class DocumentEvent:
    """An event of one document: a whole document, a delete, or a partial update.

    Documents (Extended JSON) are only needed where updates are folded.
    """

    sequence: str
    offset: int
    op: bronze.Op
    is_whole: bool = False
    document: str | None = None
    before: str | None = None
    update: PartialUpdate | None = None

    @property
    def is_partial(self) -> bool:
        """Whether it is an update without its document."""
        return self.op is bronze.Op.UPDATE and not self.is_whole


@dataclass(frozen=True)
class DocumentVersion:
    """A document's state from `sequence` until `until`; None for the current version.

    `offset` is that of the event that made it, None for a stored version. `is_deleted`: a delete ended it. A delete
    without a known version before it is a version that ends where it begins. `document` is set where updates are
    folded.
    """

    sequence: str
    until: str | None = None
    is_incomplete: bool = False
    is_deleted: bool = False
    document: str | None = None
    offset: int | None = None


def changed(stored: Sequence[DocumentVersion], events: Sequence[DocumentEvent], *, folds: bool) -> Iterator[DocumentVersion]:
    """The new versions, and the stored ones that now end elsewhere, in order.

    `stored` are the key's versions that end at the first event or later, with their documents if `folds` is true. If it
    is false, a partial update makes a version with only the fields that it contains.
    """
    by_sequence = {version.sequence: version for version in stored}
    # Only changed versions go into the MERGE, so that a long history is not rewritten.
    return (version for version in _all(by_sequence, events, folds=folds) if version != by_sequence.get(version.sequence))


def _all(
    before: Mapping[str, DocumentVersion], events: Sequence[DocumentEvent], *, folds: bool
) -> Iterator[DocumentVersion]:
    """All versions of the key including the stored ones (`before`, by sequence), lazily: each may hold a whole document."""
    events_by_sequence = {event.sequence: event for event in sorted(events, key=lambda event: event.offset)}
    # An end without a version that begins there: a delete, or a sweep, which has no row.
    ends = {version.until: version.is_deleted for version in before.values() if version.until is not None}
    current: DocumentVersion | None = None
    last_delete: DocumentEvent | None = None
    for sequence in sorted({*before, *events_by_sequence, *ends}):
        event, version = events_by_sequence.get(sequence), before.get(sequence)
        is_delete = event is not None and event.op is bronze.Op.DELETE
        next_version = _made(event, current if folds else None) if event is not None and not is_delete else None
        if event is None and version is not None:
            next_version = replace(version, until=None, is_deleted=False)
        is_marker = event is None and version is not None and version.until == sequence
        is_end = event is None and version is None
        if current is not None:
            yield replace(current, until=sequence, is_deleted=is_delete or ((is_end or is_marker) and ends[sequence]))
        elif event is not None and is_delete:
            # A delete of an unknown document is kept too, because an earlier version may still come.
            yield DocumentVersion(sequence, sequence, is_deleted=True, offset=event.offset)
        elif is_end and last_delete is not None:
            # The version that ended here now ends earlier, and an event in between may still come. The end's own event
            # was applied in an earlier run, so the row takes its offset from the delete at hand.
            yield DocumentVersion(sequence, sequence, is_deleted=ends[sequence], offset=last_delete.offset)
        last_delete = event if is_delete else last_delete
        current = next_version
        if is_marker and version is not None:
            yield version
            current = None
    if current is not None:
        yield current


def _made(event: DocumentEvent, current: DocumentVersion | None) -> DocumentVersion:
    """The version that starts with this event, which is not a delete."""
    if not event.is_partial:
        return DocumentVersion(event.sequence, document=event.document, offset=event.offset)
    base = None if current is None else current.document
    is_unsure = current is None or current.is_incomplete or current.document is None  # its documents were not kept
    # A pre-image is the whole document before the update, so nothing earlier is needed. An unreadable one counts as none.
    if is_unsure and fold.is_document(event.before):
        base, is_unsure = event.before, False
    document, is_incomplete = fold.folded_text(base, [event.update or PartialUpdate.unreadable(event.sequence)])
    return DocumentVersion(event.sequence, document=document, is_incomplete=is_incomplete or is_unsure, offset=event.offset)


def laid_out(folds: bool) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """`changed` for `mapInArrow`: rows `__key, events, stored` (arrays of `EVENT` and of the fields of `DocumentVersion`)
    to rows of `LAID_OUT_DDL`.
    """

    def lay_out(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows: list[dict[str, Any]] = []
        size = 0
        for batch in batches:
            for row in _one_by_one(batch):
                events = [event(struct) for struct in row["events"]]
                stored = [DocumentVersion(**struct) for struct in row["stored"] or ()]
                for version in changed(stored, events, folds=folds):
                    rows.append({"__key": row["__key"], **vars(version)})
                    size += _ROW_BYTES + len(version.document or "")
                    # One key can have very many versions, each as large as the document, and a partition very many keys.
                    if size >= fold.OUTPUT_BYTES:
                        yield from pa.Table.from_pylist(rows, schema=_SCHEMA).to_batches()
                        rows, size = [], 0
        yield from pa.Table.from_pylist(rows, schema=_SCHEMA).to_batches()

    return lay_out


def _one_by_one(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """The rows as Python values, converted in small slices, because one row can become many versions."""
    for start in range(0, batch.num_rows, _ROWS_AT_A_TIME):
        yield from batch.slice(start, _ROWS_AT_A_TIME).to_pylist()


def event(row: Mapping[str, Any]) -> DocumentEvent:
    """The event from the fields of `EVENT`."""
    is_partial = row["op"] == bronze.Op.UPDATE.value and not row["is_whole"]
    update = PartialUpdate.from_bronze(row) if is_partial else None
    return DocumentEvent(
        row["sequence"], row["offset"], bronze.Op(row["op"]), row["is_whole"], row["after"], row["before"], update
    )
