"""Checkpoints of a table's log that are one Parquet file, written by this process.

Delta's own are jobs of one to two seconds, more beside other work, and the collection whose commit is due waits for them. What a
checkpoint says is what the one before it and the commits since then say (Delta's protocol, "Checkpoints" and "Action
Reconciliation"), which takes this process some hundredths of a second. Delta still writes each tenth, drops there what has expired,
and writes all of those of a table that uses anything this module does not know.
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
"""Tables with a shorter `delta.checkpointInterval` have all of theirs from Delta."""

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
"""A row is one action: the column of its kind, and nulls."""

_OF_ONE_COMMIT = {"commitInfo", "cdc"}
_PARSED = {"stats_parsed", "partitionValues_parsed"}  # the same once more, as columns
_OF_NO_CHECKPOINT = {"remove": {"tags", "stats"}}
_FEATURES = {
    *"appendOnly invariants checkConstraints changeDataFeed generatedColumns identityColumns columnMapping".split(),
    *"deletionVectors rowTracking timestampNtz domainMetadata v2Checkpoint vacuumProtocolCheck clustering".split(),
    *"typeWidening typeWidening-preview inCommitTimestamp allowColumnDefaults checkpointProtection".split(),
}
"""Features of which a checkpoint in the classic form needs nothing beside these actions."""

_ELSEWHERE = {"delta.checkpointPolicy": "v2", "delta.checkpoint.writeStatsAsJson": "false"}
"""Properties of tables whose checkpoints have another form."""

_Identity = tuple[Any, ...]
"""What an action is about: of two about the same the later one counts."""

_Later = dict[_Identity, tuple[str, dict[str, Any]]]
"""Actions by what they are about, each with its kind."""

_FILES = ("add", "remove")
_NAMES = {"txn": "appId", "domainMetadata": "domain"}
"""What tells two actions of a kind apart; of the other kinds one counts."""


class _NotKnown(Exception):
    """The log says something that is not known here."""


def every(interval: int) -> int | None:
    """After so many commits this process writes a checkpoint of a table with this `delta.checkpointInterval`; None where it writes
    none."""
    return interval // definition.CHECKPOINTS_TO_ONE_OF_DELTA if interval >= LEAST_INTERVAL else None


def write(folder: Path, version: int) -> bool:
    """Write the checkpoint of a version and note it as the last; whether that was done.

    The commit has been made, whatever becomes of its checkpoint: nothing is raised where the disk is full or the log says what
    is not known here, and Delta goes on from the one before.
    """
    logs = folder / LOG
    try:
        begun = checkpoint.newest(folder, version)
        if begun is not None and begun.name == checkpoint.name(version):
            return False
        later = _later(folder, begun, version)
        _check(begun, later)
        path, size, adds = logs / checkpoint.name(version), 0, 0
        with _replaced(path) as draft, pq.ParquetWriter(draft, SCHEMA) as written:
            for part in filter(len, _parts(begun, later)):  # older readers refuse a row group of no rows
                written.write_table(part)
                size, adds = size + len(part), adds + len(part) - part["add"].null_count
        noted = {"version": version, "size": size, "sizeInBytes": path.stat().st_size, "numOfAddFiles": adds}
        if (checkpoint.noted(logs) or 0) < version:
            with _replaced(logs / checkpoint.NOTED) as draft:
                draft.write_text(json.dumps(noted), "utf-8")
    except (_NotKnown, OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        log.info("leaving the checkpoint of %s at version %d to Delta: %s: %s", folder, version, type(error).__name__, error)
        return False
    return True


@contextlib.contextmanager
def _replaced(path: Path) -> Iterator[Path]:
    """Where to write what is then, whole, in the place of a file."""
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield draft
        table_files.sync(draft)
        # Hadoop's checksum of the file before it: with it this one would not be read.
        path.with_name(f".{path.name}.crc").unlink(missing_ok=True)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _later(folder: Path, begun: Path | None, version: int) -> _Later:
    """The newest actions up to a version, behind the checkpoint that it begins with."""
    found: _Later = {}
    for number in range(0 if begun is None else int(begun.name[:20]) + 1, version + 1):
        with (folder / table_files.commit_name(number)).open(encoding="utf-8") as lines:
            for line in lines:
                ((kind, action),) = json.loads(line).items()
                if kind not in _OF_ONE_COMMIT:
                    found[_identity(kind, action)] = kind, action
    return found


def _parts(begun: Path | None, later: _Later) -> Iterator[pa.Table]:
    """The actions that count, in rows of `SCHEMA`."""
    for rows in () if begun is None else _read(begun):
        yield from _kept(rows, later)
    said = [{kind: _row(kind, action)} for kind, action in later.values() if not action.get("removed")]
    yield pa.Table.from_pylist(said, SCHEMA)


def _identity(kind: str, action: Mapping[str, Any]) -> _Identity:
    return ("file", *table_files.identity(action)) if kind in _FILES else (kind, action.get(_NAMES.get(kind, "")))


def _row(kind: str, action: Mapping[str, Any]) -> dict[str, Any]:
    """An action of a commit as a checkpoint has it."""
    known = SCHEMA.field(kind).type if kind in _ACTIONS else ()
    said = {
        name: value for name, value in action.items() if name not in _OF_NO_CHECKPOINT.get(kind, ()) and value is not None
    }
    if not said.keys() <= {each.name for each in known}:
        raise _NotKnown(f"{kind} {', '.join(said.keys() - {each.name for each in known})}")
    for field in known:
        value = said.get(field.name)
        if (
            isinstance(value, dict)
            and pa.types.is_struct(field.type)
            and not value.keys() <= {each.name for each in field.type}
        ):
            raise _NotKnown(f"{kind}.{field.name} {', '.join(value)}")
        if isinstance(value, dict) and pa.types.is_map(field.type):
            said[field.name] = list(value.items())
    if kind == "metaData":
        said["format"] = {**said["format"], "options": list((said["format"].get("options") or {}).items())}
    return said | {"dataChange": False} if "dataChange" in said else said


def _read(path: Path) -> Iterator[pa.Table]:
    """The rows of a checkpoint, a part of them at a time."""
    with pq.ParquetFile(path) as held:
        names = []
        for column in held.schema_arrow:
            # Others' have a column of each kind, and what Delta leaves out.
            if column.name not in _ACTIONS and not len(held.read([column.name])[column.name].drop_null()):
                continue
            left_out = _PARSED | _OF_NO_CHECKPOINT.get(column.name, set())
            fields = [each.name for each in column.type if each.name not in left_out]
            if column.name not in _ACTIONS or not set(fields) <= _ACTIONS[column.name].keys():
                raise _NotKnown(f"column {column.name}: {', '.join(fields)}")
            if "stats" not in fields and "stats_parsed" in [each.name for each in column.type]:
                raise _NotKnown("statistics that are only columns")
            names += [f"{column.name}.{each}" for each in fields]
        for part in held.iter_batches(columns=names):
            yield pa.Table.from_batches([part]).select(SCHEMA.names).cast(SCHEMA)


def _kept(rows: pa.Table, later: _Later) -> Iterator[pa.Table]:
    """Those of the rows that no later action is about."""
    names = pa.array({identity[1] for identity in later if identity[0] == "file"}, pa.string())
    of_files = pc.coalesce(*(pc.struct_field(rows[kind], "path") for kind in _FILES))
    # By the name first, in Arrow: of a table that is written each second there are hundreds of thousands of tombstones.
    is_other = pc.and_(pc.is_valid(of_files), pc.invert(pc.is_in(of_files, value_set=names)))
    met = rows.filter(pc.invert(is_other))
    yield rows.filter(is_other)
    yield met.filter(pa.array([each not in later for each in _identities(met)], pa.bool_()))


def _identities(rows: pa.Table) -> Iterator[_Identity]:
    """The identity of each row, as of its action."""

    def values(*path: str) -> list[Any]:
        found: list[Any] = pc.struct_field(rows[path[0]], list(path[1:])).to_pylist()
        return found

    kinds = {kind: rows[kind].is_valid().to_pylist() for kind in _ACTIONS}
    names = {kind: values(kind, name) for kind, name in _NAMES.items()}
    vector = [("deletionVector", name) for name in ("storageType", "pathOrInlineDv", "offset")]
    files = {kind: list(zip(*(values(kind, *path) for path in (("path",), *vector)), strict=True)) for kind in _FILES}
    for row in range(rows.num_rows):
        kind = next(each for each in kinds if kinds[each][row])
        yield ("file", *files[kind][row]) if kind in _FILES else (kind, names[kind][row] if kind in names else None)


def _check(begun: Path | None, later: _Later) -> None:
    """Raise where the table's checkpoints are not of this form, or this is no table."""
    protocol, metadata = (_one(kind, begun, later) for kind in ("protocol", "metaData"))
    unknown = {*(protocol.get("readerFeatures") or ()), *(protocol.get("writerFeatures") or ())} - _FEATURES
    said = dict(metadata.get("configuration") or ())
    if unknown or any(str(said.get(name)).lower() == value for name, value in _ELSEWHERE.items()):
        raise _NotKnown(f"features {sorted(unknown)}" if unknown else "checkpoints of another form")


def _one(kind: str, begun: Path | None, later: _Later) -> Mapping[str, Any]:
    """The action of a kind of which one counts."""
    if found := later.get((kind, None)):
        return found[1]
    if begun is None:
        raise _NotKnown(f"no {kind}")
    with pq.ParquetFile(begun) as held:
        (action,) = held.read([kind])[kind].drop_null().to_pylist()
    return dict(action)
