"""Writes bronze from events given as short mappings, for tests of silver and gold."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson
import pyarrow as pa

from cdc_core.bronze import columns as bronze
from cdc_core.extended_json import keys
from pipelines.delta import data_file, direct_log, table_history
from pipelines.delta import tables as delta
from pipelines.delta.log_actions import Fence

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cdc_core.tables import layout as tables

DB = "cases"


def sequence(at: int, *, is_snapshot: bool = False) -> str:
    """The sequence of an event at second `at`, or of a snapshot row that was read then."""
    return f"{at:08x}{1:08x}" + ("ffffffff" if is_snapshot else "00000000")


def second(text: str) -> int:
    """The second `at` of a sequence."""
    return int(text[:8], 16)


@dataclass
class Log:
    """A bronze table that tests append batches to; its commits name the `log`, if there is one.

    Commits have their batch in their metadata, as the capture's do; without `tells` they have no metadata, as those of other writers.
    All rows have the same `ts_ms`, or with `is_timed` the number of their batch.
    """

    spark: SparkSession
    table: tables.TableRef
    log: str | None = None
    tells: bool = True
    is_timed: bool = False
    batch: int = 0
    offset: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        delta.create(self.spark, self.table, columns=bronze.COLUMNS_DDL, cluster_by=("batch",))

    def append(self, events: Mapping[str, Sequence[Mapping[str, Any]]], *, batches: int = 1) -> None:
        """Append events by collection as the next batch, or divided into `batches` of about the same size."""
        flat = [(collection, event) for collection, some in events.items() for event in some]
        size = max(1, -(-len(flat) // batches))
        rows = []
        for start in range(0, max(1, len(flat)), size):
            self.batch += 1
            rows += [self._row(collection, event) for collection, event in flat[start : start + size]]
        self._write(rows)

    def idle(self, *kinds: str, payload: str = "{}") -> None:
        """Append a batch of rows without a document, one per kind."""
        self.batch, self.offset = self.batch + 1, self.offset + len(kinds)
        common = {"batch": self.batch, "ts_ms": self._ts_ms, "payload": payload}
        places = range(self.offset - len(kinds) + 1, self.offset + 1)
        self._write(
            common | {"kind": kind, "resume_token": f"token-{place}", "offset": place} for kind, place in zip(kinds, places)
        )

    def repeat(self) -> None:
        """Append all rows again as one batch, as a stream that starts over does."""
        self.batch += 1
        again = [row | {"batch": self.batch, "offset": self.offset + number} for number, row in enumerate(self.rows, 1)]
        self.offset += len(again)
        self._write(again, remember=False)

    def _write(self, rows: Iterable[dict[str, Any]], *, remember: bool = True) -> None:
        found = list(rows)
        if remember:
            self.rows += found
        log = {"log": self.log} if self.log else {}
        said = {"writer": "by hand", "released": True, "batch": self.batch, "commit": uuid.uuid4().hex[:12], **log}
        self._commit(pa.Table.from_pylist(found, schema=bronze.SCHEMA), orjson.dumps(said).decode() if self.tells else None)

    def _commit(self, rows: pa.Table, metadata: str | None) -> None:
        """Commit as the capture does if the table has a direct log, because a Spark statement takes many times as long."""
        direct = direct_log.of(self.spark, self.table)
        if direct is None or metadata is None:
            options = {} if metadata is None else {"userMetadata": metadata}
            frame = self.spark.createDataFrame(rows).coalesce(1)
            frame.write.format("delta").options(**options).mode("append").saveAsTable(str(self.table))
            return
        file = data_file.ParquetFile.write(
            direct.store, [rows], schema=rows.schema, statistics=bronze.STATISTICS, table=self.table
        )
        direct.commit(file, Fence(table_history.version(self.spark, self.table), metadata))

    @property
    def _ts_ms(self) -> int:
        return self.batch if self.is_timed else 5

    def _row(self, collection: str, event: Mapping[str, Any]) -> dict[str, Any]:
        self.offset += 1
        common = {"resume_token": f"token-{self.offset}", "offset": self.offset, "batch": self.batch, "ts_ms": self._ts_ms}
        if "sweep" in event:
            first = sequence(event["sweep"], is_snapshot=True)
            namespace = f"{DB}.{collection}"
            state = {"chunks": 1, "documents": 1, "completed": True, "first": first, "sweep": True}
            plan = {"id": f"s-{collection}", "type": event.get("type", "incremental"), "planned": [namespace]}
            payload = {"snapshot": {**plan, "collections": {namespace: state}}}
            return common | {"kind": "heartbeat", "payload": text(payload)}
        if "drop" in event:
            place = {"db": DB, "collection": collection, "sequence": sequence(event["drop"])}
            return common | place | {"kind": "schema_change", "payload": text({"operation": "drop"})}
        is_snapshot = event["op"] == "r"
        return common | {
            "kind": "snapshot" if is_snapshot else "change",
            "op": event["op"],
            "db": DB,
            "collection": collection,
            "key": keys.canonical(event["key"]),
            "sequence": sequence(event["at"], is_snapshot=is_snapshot),
            "before": text(event.get("before")),
            "after": event.get("text") or text(event.get("after")),
            "updateDescription": _description(event),
            "source": {"db": DB, "collection": collection, "ts_ms": event["at"] * 1000},
        }


def _description(event: Mapping[str, Any]) -> dict[str, Any] | None:
    if not {"update", "removed", "truncated"} & event.keys():
        return None
    return {
        "updatedFields": text(event.get("update", {})),
        "removedFields": event.get("removed", []),
        "truncatedArrays": event.get("truncated", []),
        "disambiguatedPaths": text(event.get("disambiguated")),
    }


def text(document: object) -> str | None:
    """A document as bronze holds it; text is returned unchanged."""
    return document if document is None or isinstance(document, str) else orjson.dumps(document).decode()
