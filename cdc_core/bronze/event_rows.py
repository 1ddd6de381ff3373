"""Change events as bronze rows: Debezium's envelope, in columns.

`EventRows` takes raw change-stream documents in stream order and becomes an Arrow table of `bronze.SCHEMA`. It is the
hottest loop of the capture service, so it fills one list a column and leaves the rest to Arrow.

Sources: Debezium "MongoDB connector", section "Change events" (op, before, after, updateDescription, source);
MongoDB "Change Events" (operation types, lsid, txnNumber, wallTime).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, SupportsInt

import orjson
import pyarrow as pa

from cdc_core.bronze import columns as bronze
from cdc_core.bronze import document_column, raw_event, source_block
from cdc_core.extended_json import bson_to_json
from cdc_core.stream import cursor_pipeline, resume_token, transactions
from cdc_core.stream import fields as field_filters

SKIPPED = "medallionSkipped"
"""The field of an event whose documents the server took out because they are too large: their size in bytes."""


ROW_BYTES = 600
"""What a row takes beside its documents while it waits for its commit: the objects and references of its columns."""


_OPS = {"insert": "c", "update": "u", "replace": "u", "delete": "d"}


FieldsOf = Callable[[str, str], "field_filters.FieldRules | None"]
"""``(db, collection) -> what happens to its documents' fields``."""


@dataclass(frozen=True)
class OtherRow:
    """A row that is not about an event of the stream: a heartbeat, a notification, a signal."""

    token: str
    kind: bronze.RowKind
    payload: Mapping[str, object]
    db: str | None = None
    collection: str | None = None


class EventRows:
    """Rows in the making: events are added, then they are numbered and become a table.

    `lossy` counts the documents whose text was not valid UTF-8 and was repaired, `skipped` the events that were too large,
    `filtered` those that `includes` left out; `lossy` is known when they are a table. `then` is what is to be done when the rows are committed,
    `taken` the names of `field.renames` that documents had already.
    """

    def __init__(self, name: str, columns: document_column.DocumentColumns | None = None) -> None:
        self.name = name
        self._columns = columns or document_column.DocumentColumns()
        self._after: pa.ChunkedArray | None = None
        self.bytes = 0
        self.lossy = 0
        self.skipped = 0
        self.filtered = 0
        self.ended_transactions = 0
        self.changes = 0
        self._tokens: list[str] = []
        self._kinds: list[str] = []
        self._ops: list[str | None] = []
        self._dbs: list[str | None] = []
        self._collections: list[str | None] = []
        self._keys: list[str | None] = []
        self._document_keys: list[bytes | None] = []
        self._sequences: list[str | None] = []
        self._befores: list[bytes | None] = []
        self._afters: list[bytes | raw_event.FullDocument | None] = []
        self._descriptions: list[dict[str, Any] | None] = []
        self._has_descriptions = False
        self._payloads: list[bytes | None] = []
        self._seconds: list[int | None] = []
        self._ords: list[int | None] = []
        self._lsids: list[str | None] = []
        self._txn_numbers: list[int | None] = []
        self._wall_times: list[int | None] = []
        self._transactions: list[dict[str, Any] | None] = []
        self._has_transactions = False
        self.then: list[Callable[[], None]] = []
        self.taken: set[str] = set()

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def length(self) -> tuple[int, int]:
        """How many rows there are, and how much is to be done when they are committed."""
        return len(self), len(self.then)

    def cut(self, length: tuple[int, int]) -> None:
        """Take back the rows, and what is to be done with them, that were added since there were so many."""
        rows, then = length
        # Every list but `then` is a column: a new one is cut with the others.
        for name, held in vars(self).items():
            if isinstance(held, list):
                del held[then if name == "then" else rows :]

    @property
    def token(self) -> str | None:
        """The resume token of the last row."""
        return self._tokens[-1] if self._tokens else None

    @property
    def namespace(self) -> str:
        """The namespace of the last row, which has one."""
        return f"{self._dbs[-1]}.{self._collections[-1]}"

    def operations(self) -> Mapping[str | None, int]:
        """How many rows there are of each `op`."""
        return Counter(self._ops)

    @property
    def newest_time(self) -> tuple[int, int] | None:
        """The cluster time of the last event: seconds since 1970 and increment."""
        pairs = zip(reversed(self._seconds), reversed(self._ords), strict=True)
        return next(((seconds, ord_ or 0) for seconds, ord_ in pairs if seconds is not None), None)

    def add(
        self,
        raw: bytes,
        *,
        includes: Callable[[str, str], bool] | None = None,
        fields: FieldsOf | None = None,
        tracker: transactions.TransactionTracker | None = None,
        moves: transactions.ShardMoves | None = None,
        ts_ms: int = 0,
        is_signal_collection: Callable[[str, str], bool] | None = None,
        skipped: Collection[str] = (),
    ) -> Mapping[str, Any] | None:
        """Add one change-stream document as it came from the server; the event where it is a control event.

        `includes` decides on documents' namespaces where the server could not decide by itself; `fields` tells what is
        taken out or renamed in a collection's documents; `tracker` counts transactions, whose BEGIN and END become
        rows; `moves` orders what they do on two shards; events of `skipped` operation types get no row. Control events are what is not about a document, and
        inserts into the collection that `is_signal_collection` names: the capture has to act on them.
        """
        event, proven, is_exact, document = raw_event.envelope(
            raw, is_used=lambda event: _uses_document(event, fields, is_signal_collection)
        )
        if cursor_pipeline.GUARD in event:
            raw_event.check_unchanged(event, raw)
            for name in cursor_pipeline.made_up(event):
                del event[name]
            raw_event.check_types(event)
        operation = event["operationType"]
        op = _OPS.get(operation)
        # Everything but a document's four operations: a drop, a rename, an index, an invalidate.
        if op is None:
            if includes is None or _is_about(event, includes):
                self._add_schema_change(event, operation, len(raw))
            return event
        text = raw_event.EventText(proven, is_exact)
        document_key = event["documentKey"]
        token = event["_id"]["_data"]
        cluster_time = event["clusterTime"]
        namespace = event["ns"]
        is_signal = (
            is_signal_collection is not None
            and operation == "insert"
            and is_signal_collection(namespace["db"], namespace["coll"])
        )
        is_control = is_signal and SKIPPED not in event
        if operation in skipped or (includes is not None and not includes(namespace["db"], namespace["coll"])):
            # A signal of a collection that is not captured gets no row, and is acted on all the same.
            self.filtered += not is_control
            return event if is_control else None
        # A delete needs no document: without what was too large, the one before it, it is whole.
        if SKIPPED in event and op != bronze.Op.DELETE.value:
            self._add_skipped(event, token, key=raw_event.key(document_key, raw, is_exact=is_exact))
            return None
        after = event.get("fullDocument")
        before = event.get("fullDocumentBeforeChange")
        description = event.get("updateDescription")
        after_text = None if after is None else text.of(after, b"fullDocument")
        before_text = None if before is None else text.of(before, b"fullDocumentBeforeChange")
        description_row = None if description is None else raw_event.update_description(description, text)
        changed = None if fields is None else fields(namespace["db"], namespace["coll"])
        if changed is not None:
            after_text = None if after_text is None else raw_event.filtered(after_text, fields=changed, taken=self.taken)
            before_text = None if before_text is None else raw_event.filtered(before_text, fields=changed, taken=self.taken)
            description_row = (
                None
                if description_row is None
                else raw_event.filtered_update(description_row, fields=changed, taken=self.taken)
            )
        key = raw_event.key(document_key, raw, is_exact=is_exact)
        document_key_text = (raw_event.document_key_text(document_key, key) if is_exact else None) or text.of(
            document_key, b"documentKey"
        )
        lossless = raw_event.original(raw, fields=changed) if text.lossy else None
        sequence = resume_token.sequence_of(token)
        lsid, txn_number = raw_event.lsid(event, proven if is_exact else None), event.get("txnNumber")
        transaction = None if moves is None else transactions.identifier(lsid, txn_number)
        if moves is not None and transaction is not None:
            written = transactions.document(namespace, key)
            sequence = moves.sequence(transactions.ShardWrite(transaction, written, document_key_text, op, sequence))
        wall_time = event.get("wallTime")
        # From here on nothing fails: an event has all its columns or none.
        block = None
        if tracker is not None:
            # Before the event's own columns: the rows of an END and a BEGIN stand in front of it.
            block = self._seen(tracker, lsid, txn_number, namespace, token=token, ts_ms=ts_ms)
        self._transactions.append(block)
        self._tokens.append(token)
        self._kinds.append("change")
        self._ops.append(op)
        self._dbs.append(namespace["db"])
        self._collections.append(namespace["coll"])
        self._keys.append(key)
        self._document_keys.append(document_key_text)
        self._sequences.append(sequence)
        self._befores.append(before_text)
        self._afters.append(document or after_text)
        self._descriptions.append(description_row)
        self._has_descriptions = self._has_descriptions or description_row is not None
        self._payloads.append(lossless)
        self._seconds.append(cluster_time.time)
        self._ords.append(cluster_time.inc)
        self._lsids.append(lsid)
        self._txn_numbers.append(txn_number)
        self._wall_times.append(None if wall_time is None else int(wall_time))
        self.changes += 1
        self.lossy += text.lossy
        # Estimated from what is there anyway: an exact size would have to be computed for each event.
        self.bytes += len(after_text or b"") + len(before_text or b"") + len(lossless or b"") + ROW_BYTES
        self.bytes += len(key) + len(document_key_text) + len(token) + (0 if document is None else len(raw))
        if description_row is not None:
            self.bytes += raw_event.description_bytes(description_row)
        return event if is_control else None

    def end_transaction(self, tracker: transactions.TransactionTracker, *, token: str, ts_ms: int) -> None:
        """Add the END of the open transaction, when the stream is past it, at `token`."""
        ended = tracker.end()
        if ended is not None:
            self._add_transaction(transactions.end_payload(ended, ts_ms=ts_ms), token)
            self.ended_transactions += 1

    def _seen(
        self,
        tracker: transactions.TransactionTracker,
        lsid: str | None,
        txn_number: int | None,
        namespace: Mapping[str, str],
        *,
        token: str,
        ts_ms: int,
    ) -> dict[str, Any] | None:
        seen = tracker.see(transactions.identifier(lsid, txn_number), f"{namespace['db']}.{namespace['coll']}")
        before = tracker.token or token
        if seen.ended is not None:
            self._add_transaction(transactions.end_payload(seen.ended, ts_ms=ts_ms), before)
            self.ended_transactions += 1
        if seen.began is not None:
            self._add_transaction(transactions.begin_payload(seen.began, ts_ms=ts_ms), before)
        tracker.token = token
        self._has_transactions = self._has_transactions or seen.block is not None
        return seen.block

    def _add_transaction(self, payload: Mapping[str, Any], token: str) -> None:
        """A BEGIN or END row; its token is that of what came before it, for a restart must not pass what follows."""
        self._other(token, bronze.RowKind.TRANSACTION.value, None, None, orjson.dumps(payload))

    def mark(self, mark: OtherRow) -> None:
        """Add a row of another kind, with a JSON payload."""
        self._other(mark.token, mark.kind.value, mark.db, mark.collection, orjson.dumps(mark.payload, default=str))

    def table(self, *, batch: int, first_offset: int, ts_ms: int) -> pa.Table:
        """The rows as a table of `bronze.SCHEMA`, numbered from `first_offset` on within one batch."""
        rows = len(self)
        after = self._after_column()  # before the payloads: it may add to them
        return bronze.table(
            rows,
            resume_token=pa.array(self._tokens, pa.string()),
            offset=pa.array(range(first_offset, first_offset + rows), pa.int64()),
            batch=batch,
            kind=pa.array(self._kinds, pa.string()),
            op=pa.array(self._ops, pa.string()),
            db=pa.array(self._dbs, pa.string()),
            collection=pa.array(self._collections, pa.string()),
            key=pa.array(self._keys, pa.string()),
            documentKey=pa.array(self._document_keys, pa.string()),
            sequence=pa.array(self._sequences, pa.string()),
            before=pa.array(self._befores, pa.string()),
            after=after,
            updateDescription=self._description_column(),
            source=self._source_column(),
            transaction=pa.array(self._transactions, bronze.TRANSACTION) if self._has_transactions else None,
            payload=pa.array(self._payloads, pa.string()),
            ts_ms=ts_ms,
        )

    def _add_schema_change(self, event: Mapping[str, Any], operation: str, size: int) -> None:
        namespace = event.get("ns") or {}
        payload: dict[str, Any] = {"operation": operation}
        target = event.get("to")
        if target is not None:
            payload["to"] = {"db": target.get("db"), "collection": target.get("coll")}
        if event.get("operationDescription") is not None:
            payload["description"] = orjson.loads(bson_to_json.dumps_value(event["operationDescription"]))
        cluster_time = event["clusterTime"]
        token = event["_id"]["_data"]
        self._other(
            token,
            "schema_change",
            namespace.get("db"),
            namespace.get("coll"),
            orjson.dumps(payload),
            sequence=resume_token.sequence_of(token),
            time=(cluster_time.time, cluster_time.inc),
            wall_time=event.get("wallTime"),
        )
        self.changes += 1
        self.bytes += size

    def _other(
        self,
        token: str,
        kind: str,
        db: str | None,
        collection: str | None,
        payload: bytes,
        *,
        sequence: str | None = None,
        time: tuple[int | None, int | None] = (None, None),
        wall_time: SupportsInt | None = None,
    ) -> None:
        self._tokens.append(token)
        self._kinds.append(kind)
        self._ops.append(None)
        self._dbs.append(db)
        self._collections.append(collection)
        self._keys.append(None)
        self._document_keys.append(None)
        self._sequences.append(sequence)
        self._befores.append(None)
        self._afters.append(None)
        self._descriptions.append(None)
        self._payloads.append(payload)
        self._seconds.append(time[0])
        self._ords.append(time[1])
        self._lsids.append(None)
        self._txn_numbers.append(None)
        self._wall_times.append(None if wall_time is None else int(wall_time))
        self._transactions.append(None)
        self.bytes += len(payload) + 200

    def _add_skipped(self, event: Mapping[str, Any], token: str, *, key: str) -> None:
        """An event that is too large leaves a notification, so that it is counted and can be looked for."""
        namespace = event["ns"]
        payload = {
            "aggregate_type": "Oversize Event",
            "type": "SKIPPED",
            "additional_data": {
                "operation": event["operationType"],
                "key": key,
                "size": int(event[SKIPPED]),
            },
        }
        self._other(token, bronze.RowKind.NOTIFICATION.value, namespace["db"], namespace["coll"], orjson.dumps(payload))
        self.skipped += 1

    def _after_column(self) -> pa.ChunkedArray:
        # Once: a commit that came second is tried again.
        if self._after is None or len(self._after) != len(self):
            self._after, lossy = self._columns.texts(self._afters, list(zip(self._dbs, self._collections, strict=True)))
            for place in lossy:
                document = self._afters[place]
                assert isinstance(document, raw_event.FullDocument)
                self._payloads[place] = raw_event.original(document.event, fields=None)
            self.lossy += len(lossy)
        return self._after

    def _description_column(self) -> pa.Array | None:
        if not self._has_descriptions:
            return None
        given = self._descriptions
        fields = [
            pa.array([None if one is None else one[field.name] for one in given], field.type)
            for field in bronze.UPDATE_DESCRIPTION
        ]
        mask = pa.array([one is None for one in given], pa.bool_())
        return pa.StructArray.from_arrays(fields, fields=list(bronze.UPDATE_DESCRIPTION), mask=mask)

    def _source_column(self) -> pa.Array:
        return source_block.source_column(
            name=self.name,
            dbs=pa.array(self._dbs, pa.string()),
            collections=pa.array(self._collections, pa.string()),
            seconds=pa.array(self._seconds, pa.int64()),
            ords=pa.array(self._ords, pa.int32()),
            lsids=pa.array(self._lsids, pa.string()),
            txn_numbers=pa.array(self._txn_numbers, pa.int64()),
            wall_times=pa.array(self._wall_times, pa.int64()),
        )


def _uses_document(
    event: Mapping[str, Any], fields: FieldsOf | None, is_signal_collection: Callable[[str, str], bool] | None
) -> bool:
    """Whether more is done with the document behind an event than to write it."""
    if cursor_pipeline.GUARD in event:  # stages may have taken anything away
        return True
    namespace = event["ns"]["db"], event["ns"]["coll"]
    return (fields is not None and fields(*namespace) is not None) or (
        event["operationType"] == "insert" and is_signal_collection is not None and is_signal_collection(*namespace)
    )


def _is_about(event: Mapping[str, Any], includes: Callable[[str, str], bool]) -> bool:
    """Whether an event that is not a document's concerns what is captured: its collection or database, or its new name."""
    named = [each for each in (event.get("ns"), event.get("to")) if each]
    return not named or any("coll" not in each or includes(each["db"], each["coll"]) for each in named)
