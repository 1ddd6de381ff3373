"""Change events as bronze rows: Debezium's envelope in columns.

`EventRows` takes raw change-stream documents in stream order and becomes an Arrow table of `bronze.SCHEMA`. It is the
hottest loop of the capture service, so it fills one list per column and leaves the rest to Arrow.

Sources: Debezium "MongoDB connector", section "Change events" (op, before, after, updateDescription, source); MongoDB
"Change Events" (operation types, lsid, txnNumber, wallTime).
"""

from __future__ import annotations

import functools
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
"""The field of an event whose documents the server removed because they are too large: their size in bytes."""


ROW_BYTES = 600
"""The memory of a waiting row besides its documents: the objects and references of its columns."""


_OPS = {"insert": "c", "update": "u", "replace": "u", "delete": "d"}


FieldsOf = Callable[[str, str], "field_filters.FieldRules | None"]
"""``(db, collection) -> field rules of its documents``."""


@dataclass(frozen=True)
class OtherRow:
    """A row that is not an event of the stream: a heartbeat, a notification, a signal."""

    token: str
    kind: bronze.RowKind
    payload: Mapping[str, object]
    db: str | None = None
    collection: str | None = None


class EventRows:
    """Collects events as rows, then numbers them and makes a table.

    `lossy` is the number of documents with repaired text (final after `table`), `skipped` that of events that were too
    large, `filtered` that of events that `includes` left out. `then` are actions for after the commit, `name_conflicts` names of
    `field.renames` that documents already had (final after `table`).
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
        self.name_conflicts: set[str] = set()

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def length(self) -> tuple[int, int]:
        """The number of rows, and of actions after their commit."""
        return len(self), len(self.then)

    def cut(self, length: tuple[int, int]) -> None:
        """Remove the rows and actions that were added after `length` was read."""
        rows, actions = length
        # Every list except `then` is a column.
        for name, attribute in vars(self).items():
            if isinstance(attribute, list):
                del attribute[actions if name == "then" else rows :]

    @property
    def token(self) -> str | None:
        """The resume token of the last row."""
        return self._tokens[-1] if self._tokens else None

    @property
    def namespace(self) -> str:
        """The namespace of the last row, which must have one."""
        return f"{self._dbs[-1]}.{self._collections[-1]}"

    def operations(self) -> Mapping[str | None, int]:
        """The number of rows by `op`."""
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
        """Add one change-stream document as it came from the server; returns the event if it is a control event.

        `includes` filters namespaces that the server could not filter. `fields` gives the rules for a collection's
        fields. `tracker` counts transactions, whose BEGIN and END become rows. `moves` orders the events of a
        transaction on two shards. Events of `skipped` operation types get no row. Control events are those that are not
        about a document, and inserts into the collection that `is_signal_collection` names: the capture has to act on
        them.
        """
        event, proven, is_exact, document = raw_event.envelope(
            raw, is_used=lambda event: _uses_document(event, is_signal_collection)
        )
        if cursor_pipeline.GUARD in event:
            raw_event.check_unchanged(event, raw)
            for name in cursor_pipeline.made_up(event):
                del event[name]
            raw_event.check_types(event)
        operation = event["operationType"]
        op = _OPS.get(operation)
        # Everything except the four operations of documents: a drop, a rename, an index, an invalidate.
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
            # A signal in a collection that is not captured gets no row, but is executed.
            self.filtered += not is_control
            return event if is_control else None
        # A delete is complete without a document; only its pre-image was too large.
        if SKIPPED in event and op != bronze.Op.DELETE.value:
            self._add_skipped(event, token, key=raw_event.key(document_key, raw, is_exact=is_exact))
            return None
        after = event.get("fullDocument")
        before = event.get("fullDocumentBeforeChange")
        description = event.get("updateDescription")
        after_text = None if after is None else text.of(after, b"fullDocument")
        before_text = None if before is None else text.of(before, b"fullDocumentBeforeChange")
        description_row = None if description is None else raw_event.update_description(description, text)
        rules = None if fields is None else fields(namespace["db"], namespace["coll"])
        if rules is not None:
            filtered = functools.partial(raw_event.filtered, fields=rules, name_conflicts=self.name_conflicts)
            after_text = None if after_text is None else filtered(after_text)
            before_text = None if before_text is None else filtered(before_text)
            if description_row is not None:
                description_row = raw_event.filtered_update(
                    description_row, fields=rules, name_conflicts=self.name_conflicts
                )
        key = raw_event.key(document_key, raw, is_exact=is_exact)
        document_key_text = (raw_event.document_key_text(document_key, key) if is_exact else None) or text.of(
            document_key, b"documentKey"
        )
        lossless = raw_event.original(raw, fields=rules) if text.lossy else None
        sequence = resume_token.sequence_of(token)
        lsid, txn_number = raw_event.lsid(event, proven if is_exact else None), event.get("txnNumber")
        transaction = None if moves is None else transactions.identifier(lsid, txn_number)
        if moves is not None and transaction is not None:
            identity = transactions.document(namespace, key)
            sequence = moves.sequence(transactions.ShardWrite(transaction, identity, document_key_text, op, sequence))
        if op == bronze.Op.DELETE.value and len(document_key) > 1:
            # Of a delete it may become a row, and has the shard key's paths. That of an insert tells shards apart (`ShardMoves`).
            if rules is not None:
                document_key_text = raw_event.filtered_key(
                    document_key_text, fields=rules, name_conflicts=self.name_conflicts
                )
            document_key_text = raw_event.key_document(document_key_text)
        wall_time = event.get("wallTime")
        # Nothing fails from here on, so an event has all its columns or none.
        block = None
        if tracker is not None:
            # Before the event's own columns, because END and BEGIN rows precede it.
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
        self._afters.append(after_text if document is None else document._replace(fields=rules))
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
        # An estimate from known lengths; an exact size would be costly for each event.
        self.bytes += len(after_text or b"") + len(before_text or b"") + len(lossless or b"") + ROW_BYTES
        self.bytes += len(key) + len(document_key_text) + len(token) + (0 if document is None else len(raw))
        if description_row is not None:
            self.bytes += raw_event.description_bytes(description_row)
        return event if is_control else None

    def end_transaction(self, tracker: transactions.TransactionTracker, *, token: str, ts_ms: int) -> None:
        """Add the END of the open transaction, if the stream is past it; `token` is the stream's."""
        transaction = tracker.end()
        if transaction is not None:
            self._add_transaction(transactions.end_payload(transaction, ts_ms=ts_ms), token)
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
        step = tracker.see(transactions.identifier(lsid, txn_number), f"{namespace['db']}.{namespace['coll']}")
        previous_token = tracker.token or token
        if step.ended is not None:
            self._add_transaction(transactions.end_payload(step.ended, ts_ms=ts_ms), previous_token)
            self.ended_transactions += 1
        if step.began is not None:
            self._add_transaction(transactions.begin_payload(step.began, ts_ms=ts_ms), previous_token)
        tracker.token = token
        self._has_transactions = self._has_transactions or step.block is not None
        return step.block

    def _add_transaction(self, payload: Mapping[str, Any], token: str) -> None:
        """A BEGIN or END row, with the token of what came before it: a restart must not skip what follows."""
        self._other(token, bronze.RowKind.TRANSACTION.value, None, None, orjson.dumps(payload))

    def mark(self, mark: OtherRow) -> None:
        """Add a row of another kind with a JSON payload."""
        self._other(mark.token, mark.kind.value, mark.db, mark.collection, orjson.dumps(mark.payload, default=str))

    def table(self, *, batch: int, first_offset: int, ts_ms: int) -> pa.Table:
        """The rows as one batch of `bronze.SCHEMA`, with offsets from `first_offset`."""
        rows = len(self)
        after = self._after_column()  # before the payloads, to which it may add
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
        """A notification for an event that is too large, so that it is counted and can be found."""
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
        # Cached, because a commit that fails on a conflict is retried.
        if self._after is None or len(self._after) != len(self):
            namespaces = list(zip(self._dbs, self._collections, strict=True))
            self._after, lossy = self._columns.texts(self._afters, namespaces, name_conflicts=self.name_conflicts)
            for row in lossy:
                document = self._afters[row]
                assert isinstance(document, raw_event.FullDocument)
                self._payloads[row] = raw_event.original(document.event, fields=document.fields)
            self.lossy += len(lossy)
        return self._after

    def _description_column(self) -> pa.Array | None:
        if not self._has_descriptions:
            return None
        descriptions = self._descriptions
        fields = [
            pa.array([None if description is None else description[field.name] for description in descriptions], field.type)
            for field in bronze.UPDATE_DESCRIPTION
        ]
        mask = pa.array([description is None for description in descriptions], pa.bool_())
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


def _uses_document(event: Mapping[str, Any], is_signal_collection: Callable[[str, str], bool] | None) -> bool:
    """Whether the full document is needed for more than its text."""
    if cursor_pipeline.GUARD in event:  # stages may have removed anything
        return True
    if event["operationType"] != "insert" or is_signal_collection is None:
        return False
    return is_signal_collection(event["ns"]["db"], event["ns"]["coll"])


def _is_about(event: Mapping[str, Any], includes: Callable[[str, str], bool]) -> bool:
    """Whether an event that is not about a document concerns a captured collection or database, or its new name."""
    namespaces = [ns for ns in (event.get("ns"), event.get("to")) if ns]
    return not namespaces or any("coll" not in ns or includes(ns["db"], ns["coll"]) for ns in namespaces)
