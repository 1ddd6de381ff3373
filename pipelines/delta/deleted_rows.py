"""Deletion vectors of data files: reads them, and adds rows to them. Source: Delta's protocol, "Deletion Vectors"."""

from __future__ import annotations

import json
import re
import struct
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pyroaring import BitMap64

from cdc_core.tables import deletion_vector
from pipelines.delta import log_actions
from pipelines.delta.table_files import LocalFiles, TableFiles
from pipelines.delta.table_schema import NotReadable


def of(vector: Mapping[str, Any], files: TableFiles) -> BitMap64:
    """The rows of a `deletionVector` of the log, stored inline or in a file. Raises `NotReadable`, and errors of `TableFiles.read`."""
    try:
        match vector["storageType"]:
            case "i":
                return deletion_vector.read(deletion_vector.inline(vector["pathOrInlineDv"], vector["sizeInBytes"]))
            case "u":
                return deletion_vector.read(_stored(vector, files))
            case _:  # an absolute path, as in a shallow clone
                raise NotReadable
    except (ValueError, LookupError, struct.error) as error:  # truncated, or another format; Delta reports it
        raise NotReadable from error


def is_there(vector: Mapping[str, Any], folder: Path) -> bool:
    """Whether the file of a vector holds it with its size and checksum; true for an inline vector, and for one in another folder."""
    if vector["storageType"] != "u":
        return True
    try:
        return len(_stored(vector, LocalFiles(folder))) == vector["sizeInBytes"]
    except (FileNotFoundError, ValueError, struct.error):
        return False


def _stored(vector: Mapping[str, Any], files: TableFiles) -> bytes:
    """The content of a vector in a file. Raises `ValueError` or `struct.error` where it is damaged, and errors of `TableFiles.read`."""
    size = vector["sizeInBytes"] + deletion_vector.FRAME_BYTES
    return deletion_vector.framed(files.read(file_of(vector), vector.get("offset") or 0, size))


def file_of(vector: Mapping[str, Any]) -> str:
    """The name of a vector's file in the table's folder."""
    return deletion_vector.relative_path(vector["pathOrInlineDv"])


def without(places: Iterable[tuple[Mapping[str, Any], Iterable[int]]], files: TableFiles) -> list[dict[str, Any]]:
    """The actions that delete rows from files, each given by its `add` action with statistics; none for rows that are deleted already.

    Writes the new vectors into one file, as Delta does, which VACUUM removes if no commit names it: for a table in a store each file is a
    request, and on a disk a flush. Raises `NotReadable`.
    """
    name, actions, vectors, offset = uuid.uuid4(), list[dict[str, Any]](), list[bytes](), deletion_vector.OFFSET
    for file, rows in places:
        row_set, vector = BitMap64(rows), file.get("deletionVector")
        if vector:
            row_set |= of(vector, files)  # the new vector replaces the old one, and needs its rows
        count, stats = len(row_set), _statistics(file)
        if vector and count == vector["cardinality"]:
            continue
        # No row is left: the file is removed without a new vector.
        if stats["numRecords"] > count:
            vectors.append(deletion_vector.serialized(row_set))
            new_vector = {
                "storageType": "u",
                "pathOrInlineDv": deletion_vector.encoded_name(name),
                "offset": offset,
                "sizeInBytes": len(vectors[-1]),
                "cardinality": count,
            }
            offset += len(vectors[-1]) + deletion_vector.FRAME_BYTES
            new_stats = _with_loose_bounds(file["stats"], is_said="tightBounds" in stats)
            actions.append({"add": {**file, "stats": new_stats, "deletionVector": new_vector, "dataChange": True}})
        # Delta identifies a file by its name with its vector: the commit removes the old pair and adds the new one.
        actions.append(log_actions.removed(file))
    if vectors:
        files.write(f"deletion_vector_{name}.bin", deletion_vector.file(*vectors))
    return actions


def _statistics(file: Mapping[str, Any]) -> dict[str, Any]:
    """Delta's statistics of a file, which include the number of its rows. Raises `NotReadable`."""
    try:
        stats: dict[str, Any] = json.loads(file["stats"])
        int(stats["numRecords"])
    except (ValueError, TypeError, KeyError) as error:  # a file of another writer, whose rows Delta counts
        raise NotReadable from error
    return stats


def _with_loose_bounds(stats: str, *, is_said: bool) -> str:
    """A file's statistics with `tightBounds` false: rows with the minimum or maximum may be deleted. `is_said`: they have `tightBounds`.

    Edited as text: Python would round a decimal with many digits, and a rounded bound hides rows from readers.
    """
    if is_said:
        return _TIGHT_BOUNDS.sub('"tightBounds":false', stats)
    return f'{stats.rstrip()[:-1]},"tightBounds":false}}'


_TIGHT_BOUNDS = re.compile(r'"tightBounds"\s*:\s*true')
