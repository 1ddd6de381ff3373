"""Writes checkpoints of a table's log as one Parquet file, without Spark.

Delta's own checkpoint is a Spark job of one to two seconds, for which the commit has to wait. This module takes some hundredths of a
second: it combines the checkpoint before with the commits after it (Delta's protocol, "Checkpoints" and "Action Reconciliation"). Delta
still writes every tenth checkpoint, where it drops expired actions, and all checkpoints of a table with a feature that is not known here.
"""

from __future__ import annotations

import contextlib
import json
import logging
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cdc_core.tables import definition
from cdc_core.tables.layout import LOG
from pipelines.delta import checkpoint, table_files

log = logging.getLogger(__name__)

LEAST_INTERVAL = 500
"""For tables with a shorter `delta.checkpointInterval` Delta writes all checkpoints."""

_MAP, _TEXTS = pa.map_(pa.string(), pa.string()), pa.list_(pa.string())
_VECTOR = {
    "storageType": pa.string(),
    "pathOrInlineDv": pa.string(),
    "offset": pa.int32(),
    "sizeInBytes": pa.int32(),
    "cardinality": pa.int64(),
    "maxRowIndex": pa.int64(),
}
_ROW_NUMBERS = {"baseRowId": pa.int64(), "defaultRowCommitVersion": pa.int64()}
_ACTIONS: Mapping[str, Mapping[str, pa.DataType]] = {
    "txn": {"appId": pa.string(), "version": pa.int64(), "lastUpdated": pa.int64()},
    "add": {
        "path": pa.string(),
        "partitionValues": _MAP,
        "size": pa.int64(),
        "modificationTime": pa.int64(),
        "dataChange": pa.bool_(),
        "tags": _MAP,
        "deletionVector": pa.struct(_VECTOR),
        **_ROW_NUMBERS,
        "clusteringProvider": pa.string(),
        "stats": pa.string(),
    },
    "remove": {
        "path": pa.string(),
        "deletionTimestamp": pa.int64(),
        "dataChange": pa.bool_(),
        "extendedFileMetadata": pa.bool_(),
        "partitionValues": _MAP,
        "size": pa.int64(),
        "deletionVector": pa.struct(_VECTOR),
        **_ROW_NUMBERS,
    },
    "metaData": {
        "id": pa.string(),
        "name": pa.string(),
        "description": pa.string(),
        "format": pa.struct({"provider": pa.string(), "options": _MAP}),
        "schemaString": pa.string(),
        "partitionColumns": _TEXTS,
        "configuration": _MAP,
        "createdTime": pa.int64(),
    },
    "protocol": {
        "minReaderVersion": pa.int32(),
        "minWriterVersion": pa.int32(),
        "readerFeatures": _TEXTS,
        "writerFeatures": _TEXTS,
    },
    "domainMetadata": {"domain": pa.string(), "configuration": pa.string(), "removed": pa.bool_()},
}
SCHEMA = pa.schema([(kind, pa.struct(fields)) for kind, fields in _ACTIONS.items()])
"""The columns of a checkpoint. A row is one action: a value in the column of its kind, null in the others."""

_COMMIT_ONLY = {"commitInfo", "cdc"}
_PARSED = {"stats_parsed", "partitionValues_parsed"}  # parsed copies of other fields
_OMITTED = {"remove": {"tags", "stats"}}
_FEATURES = {
    *"appendOnly invariants checkConstraints changeDataFeed generatedColumns identityColumns columnMapping".split(),
    *"deletionVectors rowTracking timestampNtz domainMetadata v2Checkpoint vacuumProtocolCheck clustering".split(),
    *"typeWidening typeWidening-preview inCommitTimestamp allowColumnDefaults checkpointProtection".split(),
}
"""Table features whose classic checkpoints consist of the actions of `SCHEMA`."""

_OTHER_FORMS = {"delta.checkpointPolicy": "v2", "delta.checkpoint.writeStatsAsJson": "false"}
"""Properties of tables with checkpoints of another form."""

_Identity = tuple[Any, ...]
"""The key of an action: of two actions with the same key the later one counts."""

_Later = dict[_Identity, tuple[str, dict[str, Any]]]
"""Actions with their kind, by key."""

_FILES = ("add", "remove")
_KEY_FIELDS = {"txn": "appId", "domainMetadata": "domain"}
"""The field that distinguishes two actions of a kind; of the other kinds only one action counts."""


class _NotKnown(Exception):
    """The log contains something that this module does not support."""


def every(interval: int) -> int | None:
    """The commits between two checkpoints that this process writes, for a `delta.checkpointInterval`; None where it writes none."""
    return interval // definition.CHECKPOINTS_TO_ONE_OF_DELTA if interval >= LEAST_INTERVAL else None


def write(folder: Path, version: int) -> bool:
    """Write the checkpoint of a version and its `_last_checkpoint`; whether it was written.

    Logs its errors instead of raising them, such as a full disk or an unsupported log: the version is committed, and Delta continues from
    the checkpoint before.
    """
    logs = folder / LOG
    try:
        previous = checkpoint.newest(folder, version)
        if previous is not None and previous.name == checkpoint.name(version):
            return False
        actions = _later(folder, previous, version)
        _check(previous, actions)
        path, size, adds = logs / checkpoint.name(version), 0, 0
        with _replaced(path) as draft, pq.ParquetWriter(draft, SCHEMA) as parquet:
            for part in filter(len, _parts(previous, actions)):  # older readers refuse a row group of no rows
                parquet.write_table(part)
                size, adds = size + len(part), adds + len(part) - part["add"].null_count
        last_checkpoint = {"version": version, "size": size, "sizeInBytes": path.stat().st_size, "numOfAddFiles": adds}
        if (checkpoint.noted(logs) or 0) < version:
            with _replaced(logs / checkpoint.NOTED) as draft:
                draft.write_text(json.dumps(last_checkpoint), "utf-8")
    except (_NotKnown, OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        log.info("leaving the checkpoint of %s at version %d to Delta: %s: %s", folder, version, type(error).__name__, error)
        return False
    return True


@contextlib.contextmanager
def _replaced(path: Path) -> Iterator[Path]:
    """A draft that replaces the file, whole and on the disk, at the end of the block."""
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield draft
        table_files.sync(draft)
        # Hadoop's checksum belongs to the file before; with it Hadoop would refuse to read the new one.
        path.with_name(f".{path.name}.crc").unlink(missing_ok=True)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _later(folder: Path, begun: Path | None, version: int) -> _Later:
    """The actions that count of the commits after the checkpoint `begun`, up to a version."""
    actions: _Later = {}
    for number in range(0 if begun is None else int(begun.name[:20]) + 1, version + 1):
        with (folder / table_files.commit_name(number)).open(encoding="utf-8") as lines:
            for line in lines:
                ((kind, action),) = json.loads(line).items()
                if kind not in _COMMIT_ONLY:
                    actions[_identity(kind, action)] = kind, action
    return actions


def _parts(begun: Path | None, later: _Later) -> Iterator[pa.Table]:
    """All actions that count, as rows of `SCHEMA`."""
    for rows in () if begun is None else _read(begun):
        yield from _kept(rows, later)
    rows = [{kind: _row(kind, action)} for kind, action in later.values() if not action.get("removed")]
    yield pa.Table.from_pylist(rows, SCHEMA)


def _identity(kind: str, action: Mapping[str, Any]) -> _Identity:
    return ("file", *table_files.identity(action)) if kind in _FILES else (kind, action.get(_KEY_FIELDS.get(kind, "")))


def _row(kind: str, action: Mapping[str, Any]) -> dict[str, Any]:
    """An action of a commit in the form of a checkpoint. Raises `_NotKnown`."""
    known_fields = SCHEMA.field(kind).type if kind in _ACTIONS else ()
    fields = {name: value for name, value in action.items() if name not in _OMITTED.get(kind, ()) and value is not None}
    if not fields.keys() <= {each.name for each in known_fields}:
        raise _NotKnown(f"{kind} {', '.join(fields.keys() - {each.name for each in known_fields})}")
    for field in known_fields:
        value = fields.get(field.name)
        if (
            isinstance(value, dict)
            and pa.types.is_struct(field.type)
            and not value.keys() <= {each.name for each in field.type}
        ):
            raise _NotKnown(f"{kind}.{field.name} {', '.join(value)}")
        if isinstance(value, dict) and pa.types.is_map(field.type):
            fields[field.name] = list(value.items())
    if kind == "metaData":
        fields["format"] = {**fields["format"], "options": list((fields["format"].get("options") or {}).items())}
    return fields | {"dataChange": False} if "dataChange" in fields else fields


def _read(path: Path) -> Iterator[pa.Table]:
    """The rows of a checkpoint, in parts. Raises `_NotKnown`."""
    with pq.ParquetFile(path) as parquet:
        names = []
        for column in parquet.schema_arrow:
            # Other writers have columns for every kind, which may be empty, and fields that Delta omits.
            if column.name not in _ACTIONS and not len(parquet.read([column.name])[column.name].drop_null()):
                continue
            omitted = _PARSED | _OMITTED.get(column.name, set())
            fields = [each.name for each in column.type if each.name not in omitted]
            if column.name not in _ACTIONS or not set(fields) <= _ACTIONS[column.name].keys():
                raise _NotKnown(f"column {column.name}: {', '.join(fields)}")
            if "stats" not in fields and "stats_parsed" in [each.name for each in column.type]:
                raise _NotKnown("statistics that are only columns")
            names += [f"{column.name}.{each}" for each in fields]
        for part in parquet.iter_batches(columns=names):
            yield pa.Table.from_batches([part]).select(SCHEMA.names).cast(SCHEMA)


def _kept(rows: pa.Table, later: _Later) -> Iterator[pa.Table]:
    """The rows that no later action replaces."""
    later_paths = pa.array({identity[1] for identity in later if identity[0] == "file"}, pa.string())
    paths = pc.coalesce(*(pc.struct_field(rows[kind], "path") for kind in _FILES))
    # First by the path alone, in Arrow: a table with a commit each second has hundreds of thousands of tombstones.
    is_other = pc.and_(pc.is_valid(paths), pc.invert(pc.is_in(paths, value_set=later_paths)))
    candidates = rows.filter(pc.invert(is_other))
    yield rows.filter(is_other)
    yield candidates.filter(pa.array([identity not in later for identity in _identities(candidates)], pa.bool_()))


def _identities(rows: pa.Table) -> Iterator[_Identity]:
    """The key of each row, as `_identity` of its action."""

    def values(*path: str) -> list[Any]:
        column: list[Any] = pc.struct_field(rows[path[0]], list(path[1:])).to_pylist()
        return column

    kinds = {kind: rows[kind].is_valid().to_pylist() for kind in _ACTIONS}
    names = {kind: values(kind, name) for kind, name in _KEY_FIELDS.items()}
    vector = [("deletionVector", name) for name in ("storageType", "pathOrInlineDv", "offset")]
    files = {kind: list(zip(*(values(kind, *path) for path in (("path",), *vector)), strict=True)) for kind in _FILES}
    for row in range(rows.num_rows):
        kind = next(each for each in kinds if kinds[each][row])
        yield ("file", *files[kind][row]) if kind in _FILES else (kind, names[kind][row] if kind in names else None)


def _check(begun: Path | None, later: _Later) -> None:
    """Raise `_NotKnown` where the table's checkpoints have another form, or there is no table."""
    protocol, metadata = (_one(kind, begun, later) for kind in ("protocol", "metaData"))
    unknown = {*(protocol.get("readerFeatures") or ()), *(protocol.get("writerFeatures") or ())} - _FEATURES
    properties = dict(metadata.get("configuration") or ())
    if unknown or any(str(properties.get(name)).lower() == value for name, value in _OTHER_FORMS.items()):
        raise _NotKnown(f"features {sorted(unknown)}" if unknown else "checkpoints of another form")


def _one(kind: str, begun: Path | None, later: _Later) -> Mapping[str, Any]:
    """The newest action of a kind of which only one counts."""
    if entry := later.get((kind, None)):
        return entry[1]
    if begun is None:
        raise _NotKnown(f"no {kind}")
    with pq.ParquetFile(begun) as parquet:
        (action,) = parquet.read([kind])[kind].drop_null().to_pylist()
    return dict(action)
