"""Silver and gold without a JVM: batches that this process applies and publishes itself, to Delta logs that are written in Python.

`running` replaces Delta's transaction by plain Python, and Spark by nothing: code that needs a query raises `NeedsSpark`. A batch takes
milliseconds, so that tests can run very many.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import threading
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import types as T

from cdc_core.bronze import columns as bronze
from cdc_core.extended_json import bson_to_json, keys
from cdc_core.silver import quarantine
from cdc_core.tables import definition
from cdc_core.tables import layout as tables
from pipelines import clock
from pipelines.delta import data_file, direct_log, local_log, log_actions, query_execution, table_definition, table_files
from pipelines.delta import tables as delta
from pipelines.gold import current
from pipelines.gold import run as gold
from pipelines.silver import run as silver
from pipelines.spark import parallel
from pipelines.spark import session as sparks
from tests.harness import bronze_rows, layers, oracle


class NeedsSpark(Exception):
    """Raised where the code uses a Spark session."""


class _NoSpark:
    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name) if name.startswith("_") else NeedsSpark(name)


SPARK: Any = _NoSpark()


class _Actions:
    """`log_actions.ActionList` without Java objects."""

    def __init__(self, spark: Any = None) -> None:
        self.actions: list[dict[str, Any]] = []

    def add(self, *actions: Mapping[str, Any]) -> None:
        self.actions += [json.loads(json.dumps(action)) for action in actions]

    def seq(self) -> list[dict[str, Any]]:
        return self.actions


class _Vectors(direct_log.DeletionVectors):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def are_enabled(self, known: Any) -> bool:
        return definition.replaces_rows(table_definition.properties(self._folder) or {})


class _Transaction:
    def __init__(self, folder: Path) -> None:
        self.held = {"metaData": table_definition.newest_action(folder, "metaData")}
        self.changed: list[dict[str, Any]] = []

    def metadata(self) -> _Transaction:
        return self

    def json(self) -> str:
        return json.dumps(self.held)

    def updateMetadata(self, held: dict[str, Any], ignores: bool) -> None:
        self.changed = [held]


class _Log(direct_log.DirectLog):
    def __init__(self, folder: Path) -> None:
        self._folder, self.store, self._vectors = folder, table_files.LocalFiles(folder), _Vectors(folder)
        self._spark: Any = None
        self._action: Any = type("Action", (), {"fromJson": staticmethod(json.loads)})

    def _at(self, base: int) -> Any:
        if local_log.newest_version(self._folder) != base:
            raise direct_log.VersionTaken
        return _Transaction(self._folder)

    def _committed(self, transaction: Any, actions: Any, fence: log_actions.Fence) -> int:
        try:
            return write(self._folder, fence.base + 1, [*transaction.changed, *actions.seq()], userMetadata=fence.metadata)
        except FileExistsError:
            raise direct_log.VersionTaken from None

    def append(self, file: data_file.ParquetFile) -> int:
        while True:
            with contextlib.suppress(FileExistsError):  # another thread's append was faster
                return write(self._folder, (local_log.newest_version(self._folder) or 0) + 1, [log_actions.added(file)])


def write(folder: Path, version: int, actions: Iterable[Mapping[str, Any]], operation: str = "WRITE", **said: Any) -> int:
    """Write one commit to a log, whole or not at all, and return its version. Raises `FileExistsError` for one that exists."""
    info = {"timestamp": clock.now_ms(), "operation": operation, "operationParameters": {}, **said}
    commit = folder / "_delta_log" / f"{version:020}.json"
    draft = commit.with_suffix(f".{uuid.uuid4().hex[:8]}.draft")
    draft.write_text("".join(f"{json.dumps(action)}\n" for action in [{"commitInfo": info}, *actions]), encoding="utf-8")
    try:
        os.link(draft, commit)
    finally:
        draft.unlink()
    return version


FEATURES = {"readerFeatures": ["deletionVectors"], "writerFeatures": ["deletionVectors", "appendOnly", "invariants"]}
PLAIN_FEATURES = {"readerFeatures": [], "writerFeatures": ["appendOnly", "invariants"]}


def create(
    spark: Any,
    table: tables.TableRef,
    *,
    columns: str,
    properties: Mapping[str, str] | None = None,
    cluster_by: Sequence[str] = (),
) -> None:
    """`delta.create` in Python."""
    folder = local_log.folder(table)
    assert folder is not None
    if local_log.exists(folder):
        return
    (folder / "_delta_log").mkdir(parents=True, exist_ok=True)
    configuration = {definition.FORMAT_PROPERTY: definition.FORMAT, **(properties or {})}
    held = {
        "id": str(uuid.uuid4()),
        "format": {"provider": "parquet", "options": {}},
        "partitionColumns": [],
        "createdTime": 1,
    }
    metadata = {**held, "schemaString": _Ddl(columns).struct("").json(), "configuration": configuration}
    has_vectors = definition.is_on({definition.DELETION_VECTORS: "true", **configuration}, definition.DELETION_VECTORS)
    protocol = {"minReaderVersion": 3, "minWriterVersion": 7, **(FEATURES if has_vectors else PLAIN_FEATURES)}
    with contextlib.suppress(FileExistsError):  # another thread was faster
        write(folder, 0, [{"protocol": protocol}, {"metaData": metadata}], "CREATE TABLE")


class _Ddl:
    """A parser of the columns in the product's CREATE TABLE statements."""

    def __init__(self, text: str) -> None:
        self._tokens = re.findall(r"`(?:[^`]|``)*`|\w+(?:\(\d+, ?\d+\))?|[<>:,]", text) + [""]
        self._at = 0

    def struct(self, end: str) -> T.StructType:
        """The fields up to the token `end`, which is consumed."""
        fields = []
        while (name := self._next()) != end:
            self._skip(":")
            fields.append(T.StructField(re.sub("``", "`", name.removeprefix("`").removesuffix("`")), self._type()))
            self._skip(",")
        return T.StructType(fields)

    def _type(self) -> T.DataType:
        name = self._next().upper()
        if name in ("STRUCT", "ARRAY", "MAP"):
            self._next()
            if name == "STRUCT":
                return self.struct(">")
            inner = self._type()
            if name == "MAP":
                self._skip(",")
                return T.MapType(inner, self._closed(self._type()))
            return T.ArrayType(self._closed(inner))
        if name.startswith("DECIMAL"):
            return T.DecimalType(*map(int, re.findall(r"\d+", name)))
        return _TYPES[name]

    def _closed(self, type_: T.DataType) -> T.DataType:
        self._skip(">")
        return type_

    def _next(self) -> str:
        self._at += 1
        return str(self._tokens[self._at - 1])

    def _skip(self, token: str) -> None:
        self._at += self._tokens[self._at] == token


_TYPES = {
    "STRING": T.StringType(),
    "BIGINT": T.LongType(),
    "INT": T.IntegerType(),
    "BOOLEAN": T.BooleanType(),
    "DOUBLE": T.DoubleType(),
    "BINARY": T.BinaryType(),
    "TIMESTAMP": T.TimestampType(),
    "DATE": T.DateType(),
}


@contextlib.contextmanager
def running() -> Any:
    """Let silver and gold run with `SPARK` as their session during the block."""

    def refused(*given: Any, **named: Any) -> Any:
        raise NeedsSpark("a query")

    logs: dict[Path, _Log] = {}

    def of(spark: Any, table: tables.TableRef) -> _Log:
        folder = local_log.folder(table)
        assert folder is not None
        return logs.setdefault(folder, _Log(folder))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta, "create", create)
        patch.setattr(direct_log, "of", of)
        patch.setattr(direct_log, "_fencing_session", lambda spark, **named: SimpleNamespace(_jsparkSession=None))
        patch.setattr(log_actions, "ActionList", _Actions)
        patch.setattr(query_execution, "takes_settings", lambda spark: False)
        patch.setattr(query_execution, "session_confs", lambda spark, settings: contextlib.nullcontext())
        patch.setattr(sparks, "is_local", lambda spark: True)
        patch.setattr(current.GoldTable, "rewritten", refused)
        patch.setattr(current.GoldTable, "merged", refused)
        yield


def make_foreign(table: tables.TableRef) -> None:
    """Creates a table as another program does, with a file that is not there."""
    folder = Path(str(table.path))
    (folder / "_delta_log").mkdir(parents=True)
    made = {"id": "x", "format": {"provider": "parquet"}, "partitionColumns": [], "configuration": {}}
    made |= {"schemaString": '{"type":"struct","fields":[]}'}
    file = {"path": "a.parquet", "partitionValues": {}, "size": 1, "modificationTime": 1, "dataChange": True}
    protocol = {"minReaderVersion": 1, "minWriterVersion": 2}
    write(folder, 0, [{"protocol": protocol}, {"metaData": made}, {"add": file}])


class Hop:
    """A lakehouse with one collection, `t`, whose documents are given as BSON; for use within `running`."""

    def __init__(self, root: Path, *, vectors: bool | None = None, **silver_defaults: Any) -> None:
        made = layers.pipeline(root, **silver_defaults)
        self.settings = dataclasses.replace(made, gold=dataclasses.replace(made.gold, deletion_vectors=vectors))
        self.layout = delta.layout(self.settings.lakehouse)
        self.bronze = self.layout.bronze(self.settings.name)
        self.silver_table = self.layout.silver(bronze_rows.DB, "t")
        self.gold_table = self.layout.gold(bronze_rows.DB, "t")
        self._batch = self._offset = 0
        self.log = "one"
        create(SPARK, self.bronze, columns=bronze.COLUMNS_DDL)

    def append(self, *changes: tuple[object, bytes | Mapping[str, Any] | None], collection: str = "t") -> None:
        """Append a batch of changes: each an `_id` with its document, with the description of an update, or with None for a delete."""
        self._batch += 1
        rows = []
        for key, document in changes:
            self._offset += 1
            source = {"db": bronze_rows.DB, "collection": collection, "ts_ms": self._offset}
            place = {"resume_token": f"t{self._offset}", "offset": self._offset, "batch": self._batch, "ts_ms": 5}
            said = {"key": keys.canonical(key), "sequence": bronze_rows.sequence(10 + self._offset), "source": source}
            after = bson_to_json.dumps(document).decode() if isinstance(document, bytes) else None
            update = document if isinstance(document, Mapping) else None
            op = "d" if document is None else "u"
            rows.append(place | source | said | {"kind": "change", "op": op, "after": after, "updateDescription": update})
        self.commit(rows)

    @property
    def batch(self) -> int:
        """The newest batch."""
        return self._batch

    def drop(self, collection: str = "t") -> None:
        """Append a batch in which a collection is dropped."""
        self._batch += 1
        self._offset += 1
        place = {"resume_token": f"t{self._offset}", "offset": self._offset, "batch": self._batch, "ts_ms": 5}
        said = {
            "kind": "schema_change",
            "sequence": bronze_rows.sequence(10 + self._offset),
            "payload": '{"operation":"drop"}',
        }
        self.commit([place | said | {"db": bronze_rows.DB, "collection": collection}])

    def commit(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Commit rows of the newest batch to bronze."""
        held = pa.Table.from_pylist(rows, schema=bronze.SCHEMA)
        log = direct_log.of(SPARK, self.bronze)
        assert log is not None
        file = data_file.ParquetFile.write(
            log.store, [held], schema=held.schema, statistics=bronze.STATISTICS, table=self.bronze
        )
        base = local_log.newest_version(Path(self.bronze.path or ""))
        assert base is not None
        said = {
            "writer": "by hand",
            "released": True,
            "batch": self._batch,
            "log": self.log,
            "commit": uuid.uuid4().hex[:12],
        }
        log.commit(file, log_actions.Fence(base, json.dumps(said)))

    def silver_run(self) -> silver._SilverRun:
        """A run of silver as in a service: the caller asks for its rounds one by one, and closes it."""
        return silver._SilverRun(SPARK, self.settings, False, parallel.Pool(SPARK, None), threading.Event())

    def gold_run(self) -> gold._GoldRun:
        """The same of gold."""
        return gold._GoldRun(SPARK, self.settings, False, parallel.Pool(SPARK, None), threading.Event())

    def silver(self) -> None:
        silver.run(SPARK, self.settings)

    def gold(self) -> None:
        gold.run(SPARK, self.settings)

    def run(self) -> None:
        self.silver()
        self.gold()

    def facts(self) -> list[tuple[str, str]]:
        """The quarantine's facts: tokens with reasons, in order of the events; the first fact of an event first."""
        rows = oracle.read(self.layout.quarantine(bronze_rows.DB, "t").path or "").sort_by("offset").to_pylist()
        return [(row["resume_token"], row["reason"]) for row in rows]

    def note_fact(self, key: object, reason: quarantine.Reason, *, to: int, events: int = 1) -> None:
        """Add facts about `events` events of the document to the quarantine."""
        table = self.layout.quarantine(bronze_rows.DB, "t")
        if not delta.exists(SPARK, table):
            create(SPARK, table, columns=quarantine.COLUMNS_DDL)
        schema = bronze.SCHEMA.append(pa.field("reason", pa.string())).append(pa.field("to", pa.int64()))
        fact = {"kind": "change", "key": keys.canonical(key), "batch": 1, "offset": 0, "reason": reason.value, "to": to}
        facts = [fact | {"resume_token": f"q{number or ''}"} for number in range(events)]
        held = pa.Table.from_pylist(facts, schema=schema)
        log = direct_log.of(SPARK, table)
        assert log is not None
        log.append(data_file.ParquetFile.write(log.store, [held], schema=held.schema, statistics=("to",), table=table))


class Log(bronze_rows.Log):
    """Bronze of a hop, for events in the form of `bronze_rows`."""

    def __init__(self, hop: Hop) -> None:
        self._hop = hop
        super().__init__(SPARK, hop.bronze)

    def __post_init__(self) -> None:
        """Nothing to create: the hop has made the table."""

    def _write(self, rows: Iterable[dict[str, Any]], *, remember: bool = True) -> None:
        self._hop._batch = self.batch
        self._hop.commit([*rows])
